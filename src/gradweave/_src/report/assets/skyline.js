// A plan: one column for each tensor in backward order, higher where larger, one colour per message.

/** `buckets` are lists of tensors, as first place and count again and again; `ways` how each travels. */
function drawSkyline(parent, tensors, buckets, ways) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "skyline");
  svg.setAttribute("viewBox", `0 0 ${tensors.bytes.length} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "group");
  svg.setAttribute("aria-label", counted(buckets.length, "message"));
  const largest = Math.log(1 + tensors.bytes.reduce((a, b) => Math.max(a, b), 0));
  buckets.forEach((ranges, bucket) => {
    const top = (place) => (0.94 - 0.9 * (Math.log(1 + tensors.bytes[place]) / largest)).toFixed(3);
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", `bucket b${bucket % COLOURS}`);
    path.setAttribute("d", outline(ranges, top));
    path.setAttribute("role", "button");
    path.about = () => bucketAbout(tensors, ranges, bucket, ways);
    path.setAttribute("aria-label", path.about().title);
    svg.append(path);
  });
  parent.replaceChildren(svg);
  reachable(svg, ".bucket");
}

/** Around neighbours, so that no line is drawn between them. */
function outline(ranges, top) {
  let path = "";
  for (let pair = 0; pair < ranges.length; pair += 2) {
    const columns = tensorPlaces(ranges.slice(pair, pair + 2)).map((place) => `V${top(place)}h1`);
    path += `M${ranges[pair]} 1${columns.join("")}V1Z`;
  }
  return path;
}

function bucketAbout(tensors, ranges, bucket, ways) {
  const bytes = tensorPlaces(ranges).reduce((sum, place) => sum + tensors.bytes[place], 0);
  const count = counted(tensorCount(ranges), "tensor");
  return {
    title: `Message ${bucket + 1}: ${count}, ${byteSize(bytes)}`,
    rows: [["travels by", ways[bucket]]],
    tensors: tensorLines(tensors, ranges),
  };
}
