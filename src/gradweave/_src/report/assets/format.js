// Numbers for people, always with their unit.

function number(value, digits = 0) {
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** As many digits as `largest_s` needs: numbers that stand below each other have equally many. */
function milliseconds(seconds, largest_s = seconds) {
  const ms = largest_s * 1e3;
  return `${number(seconds * 1e3, ms < 10 ? 3 : ms < 100 ? 2 : 1)} ms`;
}

function byteSize(bytes) {
  if (bytes >= 1e6) {
    return `${number(bytes / 1e6, 2)} MB`;
  }
  return bytes >= 1e3 ? `${number(bytes / 1e3, 1)} KB` : `${number(bytes)} B`;
}

function bitRate(bits) {
  if (bits >= 1e9) {
    return `${Number((bits / 1e9).toPrecision(3))} Gbit/s`;
  }
  return `${Number((bits / 1e6).toPrecision(3))} Mbit/s`;
}

function percent(share) {
  return `${number(100 * share, 1)} %`;
}

function counted(count, noun) {
  return `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
}
