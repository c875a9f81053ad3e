// Hover and keyboard: what a picture's parts show under the pointer they show under focus too.
// A picture is one stop of the tab key; arrow keys move between its parts.

const NAMES_SHOWN = 8;

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) {
    element.className = className;
  }
  if (text !== undefined) {
    element.textContent = text;
  }
  return element;
}

const tip = make("div", "tip");
tip.id = "tip";
tip.setAttribute("role", "tooltip");
tip.hidden = true;

/** `about` is {title, rows: [[name, value]], tensors: [text]}; all of it text. */
function fillTip(about) {
  tip.replaceChildren(make("strong", "", about.title));
  if (about.rows) {
    const list = make("dl");
    for (const [name, value] of about.rows) {
      list.append(make("dt", "", name), make("dd", "", value));
    }
    tip.append(list);
  }
  if (about.tensors) {
    const list = make("ul");
    for (const tensor of about.tensors.slice(0, NAMES_SHOWN)) {
      list.append(make("li", "", tensor));
    }
    const more = about.tensors.length - NAMES_SHOWN;
    if (more > 0) {
      list.append(make("li", "more", `and ${number(more)} more; press Enter or click for all`));
    }
    tip.append(list);
  }
}

function placeTip(x, y) {
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(8, x + 14), Math.max(8, innerWidth - width - 8));
  const below = y + 18;
  const top = below + height > innerHeight - 8 ? Math.max(8, y - height - 14) : below;
  tip.style.left = `${left}px`;
  tip.style.top = `${top}px`;
}

function hideTip() {
  tip.hidden = true;
}

const dialog = make("dialog", "all");

function openDialog(about) {
  hideTip();
  const close = make("button", "", "Close");
  close.addEventListener("click", () => dialog.close());
  const list = make("ol");
  list.append(...about.tensors.map((tensor) => make("li", "", tensor)));
  dialog.replaceChildren(make("h3", "", about.title), close, list);
  dialog.showModal();
}

/** `describe(part, event)` says what a part of the picture shows. */
function explore(picture, selector, describe) {
  const partAt = (event) => event.target.closest?.(selector);
  const parts = () => [...picture.querySelectorAll(selector)];

  picture.addEventListener("pointermove", (event) => {
    const part = partAt(event);
    if (!part) {
      hideTip();
      return;
    }
    fillTip(describe(part, event));
    placeTip(event.clientX, event.clientY);
  });
  picture.addEventListener("pointerleave", hideTip);
  picture.addEventListener("focusin", (event) => {
    const part = partAt(event);
    if (!part) {
      return;
    }
    for (const other of picture.querySelectorAll(`${selector}[tabindex="0"]`)) {
      other.setAttribute("tabindex", "-1");
    }
    part.setAttribute("tabindex", "0");
    part.setAttribute("aria-describedby", "tip");
    fillTip(describe(part));
    const box = part.getBoundingClientRect();
    placeTip(Math.max(box.left, 0), box.bottom - 10);
  });
  picture.addEventListener("focusout", (event) => {
    partAt(event)?.removeAttribute("aria-describedby");
    hideTip();
  });
  picture.addEventListener("keydown", (event) => {
    const part = partAt(event);
    if (!part) {
      return;
    }
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      part.dispatchEvent(new MouseEvent("click", { bubbles: true }));
      return;
    }
    const all = parts();
    const here = all.indexOf(part);
    const target = {
      ArrowRight: all[here + 1],
      ArrowDown: all[here + 1],
      ArrowLeft: all[here - 1],
      ArrowUp: all[here - 1],
      Home: all[0],
      End: all[all.length - 1],
      Escape: null,
    }[event.key];
    if (target === null) {
      hideTip();
    } else if (target) {
      event.preventDefault();
      target.focus();
    }
  });
  picture.addEventListener("click", (event) => {
    const part = partAt(event);
    const about = part && describe(part, event);
    if (about?.tensors?.length > NAMES_SHOWN) {
      openDialog(about);
    }
  });
}

/** New parts of a picture can be reached: the first by the tab key, the others by arrow keys. */
function reachable(picture, selector) {
  picture.querySelectorAll(selector).forEach((part, place) => {
    part.setAttribute("tabindex", place === 0 ? "0" : "-1");
  });
}
