"use strict";
(() => {
  // Names are strangers' text. They enter the page as text nodes, never as markup: nothing in this
  // file parses HTML.
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  const make = (tag, options = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(options)) {
      if (name === "class") element.className = value;
      else if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  };

  // words

  const UNITS = ["B", "KB", "MB", "GB", "TB", "PB", "EB"];
  /** As the command line writes it: three digits, rounded before the unit is chosen. */
  const size = (bytes) => {
    const digits = Math.max(0, String(Math.round(bytes)).length - 3);
    const step = 10 ** digits;
    const rounded = Math.floor((bytes + Math.floor(step / 2)) / step) * step;
    let exponent = 0;
    while (exponent < UNITS.length - 1 && rounded >= 1000 ** (exponent + 1)) exponent += 1;
    return `${Number((rounded / 1000 ** exponent).toPrecision(3))} ${UNITS[exponent]}`;
  };
  const number = (value) => value.toLocaleString("en-US");
  const counted = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
  const percent = (part, whole) => {
    const value = whole ? (100 * part) / whole : 0;
    return value > 0 && value < 0.1 ? "under 0.1 %" : `${value.toFixed(value < 10 ? 1 : 0)} %`;
  };
  const day = (iso) => (iso ? new Date(iso).toLocaleDateString("en-CA") : "never");
  const STEPS = [["year", 31536e6], ["month", 2592e6], ["day", 864e5], ["hour", 36e5], ["minute", 6e4]];
  /** How long before the report was made. */
  const ago = (iso) => {
    if (!iso) return "never";
    const past = Date.parse(data.at) - Date.parse(iso);
    const step = STEPS.find(([, length]) => past >= length);
    return step ? `${counted(Math.floor(past / step[1]), step[0])} ago` : "just now";
  };
  const STATES = {
    own: "Not shared",
    shared: "Shared: several names, stored once",
    duplicate: "Duplicate: dedup would free it",
    kept: "Held only by smartcache",
    set: "Computed tensors",
    rest: "Smaller files, counted together",
  };
  const SHORT = { own: "not shared", shared: "shared", duplicate: "duplicate" };

  const say = (text) => { $("said").textContent = text; };
  const copy = async (text, button) => {
    const before = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", { class: "hidden" });
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
      button.focus();
    }
    button.textContent = "Copied";
    say("Copied");
    setTimeout(() => { button.textContent = before; }, 1400);
  };
  const copyButton = (text, label) =>
    make("button", { type: "button", text: "Copy", "aria-label": `Copy: ${label || text}`,
      onclick: (event) => copy(text, event.currentTarget) });
  const command = (text) =>
    make("div", { class: "command" }, make("code", { text, tabindex: "0" }), copyButton(text));
  const swatch = (state) => make("span", { class: `swatch ${state}`, "aria-hidden": "true" });

  // theme

  const themes = [...document.querySelectorAll("[data-theme]")].filter((each) => each.tagName === "BUTTON");
  const setTheme = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    for (const each of themes) each.setAttribute("aria-pressed", String(each.dataset.theme === name));
    // Some browsers keep nothing for a page that is a file; the choice then lasts while it is open.
    try { localStorage.setItem("smartcache-theme", name); } catch { return; }
  };
  let theme = "auto";
  try { theme = localStorage.getItem("smartcache-theme") || "auto"; } catch { theme = "auto"; }
  setTheme(["light", "dark"].includes(theme) ? theme : "auto");
  for (const each of themes) each.addEventListener("click", () => setTheme(each.dataset.theme));

  // figures

  const total = data.total;
  const made = new Date(data.at);
  $("made").textContent =
    `${counted(total.files, "file")} in ${counted(total.folders, "folder")}, as of ` +
    `${made.toLocaleDateString("en-CA")} ${made.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })}`;
  const card = (label, bytes, note, kind = "") =>
    make("div", { class: `card ${kind}` },
      make("div", { class: "label", text: label }),
      make("div", { class: "figure", text: size(bytes) }),
      make("div", { class: "note", text: note }));
  const certain = data.actions.reduce((sum, each) => sum + (each.certain ? each.size : 0), 0);
  $("cards").append(
    card("Apparent size", total.logical, "What all names add up to"),
    card("On disk", total.physical, total.store
      ? `Each file once; ${size(total.store)} more that only smartcache has` : "Each file once"),
    card("Saved by sharing", total.saved, total.saved ? "Further names that take no room" : "No file is shared yet"),
    card("Can be freed", certain, certain ? "With the commands below"
      : data.actions.length ? "See below what else there is" : "No file is here twice, and nothing is left over", "main"),
  );
  $("disks").append(...data.disks.map((each) => make("p", {}, "Disk ", make("code", { text: each.path }),
    `: ${size(each.free)} free${each.prunable ? `; prune would free ${size(each.prunable)} more` : ""}`)));
  $("warnings").append(...data.warnings.slice(0, 20).map((text) => make("p", { class: "warning", text })));
  if (data.warnings.length > 20) {
    $("warnings").append(make("p", { class: "warning", text: `... and ${number(data.warnings.length - 20)} more` }));
  }

  // the map

  const files = [];
  const names = new Map();
  const root = { name: "Everything", children: data.map };
  const prepare = (node, parent, top) => {
    node.parent = parent;
    node.top = top;
    node.states = {};
    if (!node.children) {
      node.leaves = 1;
      node.states[node.state] = node.bytes;
      if (node.path) {
        files.push(node);
        if (node.file !== undefined) {
          if (!names.has(node.file)) names.set(node.file, []);
          names.get(node.file).push(node);
        }
      }
      return node.bytes;
    }
    node.bytes = 0;
    node.leaves = 0;
    for (const child of node.children) {
      node.bytes += prepare(child, node, parent ? top : child);
      node.leaves += child.leaves;
      for (const [state, bytes] of Object.entries(child.states)) node.states[state] = (node.states[state] || 0) + bytes;
    }
    node.children.sort((a, b) => b.bytes - a.bytes);
    return node.bytes;
  };
  prepare(root, null, root);

  /** Squarified treemap (Bruls, Huizing, van Wijk): areas are in proportion to bytes. */
  const squarify = (nodes, x, y, width, height, place) => {
    let rest = nodes.reduce((sum, node) => sum + node.bytes, 0);
    let start = 0;
    while (start < nodes.length && rest > 0) {
      const side = Math.min(width, height);
      const scale = (width * height) / rest;
      let end = start;
      let row = 0;
      let worst = Infinity;
      while (end < nodes.length) {
        const sum = row + nodes[end].bytes * scale;
        const longest = nodes[start].bytes * scale;
        const least = nodes[end].bytes * scale;
        const ratio = Math.max((side * side * longest) / (sum * sum), (sum * sum) / (side * side * least));
        if (ratio > worst) break;
        worst = ratio;
        row = sum;
        end += 1;
      }
      const thick = row / side;
      let along = 0;
      for (; start < end; start += 1) {
        const length = (nodes[start].bytes * scale) / thick;
        if (width >= height) place(nodes[start], x, y + along, thick, length);
        else place(nodes[start], x + along, y, length, thick);
        along += length;
        rest -= nodes[start].bytes;
      }
      if (width >= height) { x += thick; width -= thick; } else { y += thick; height -= thick; }
    }
  };

  const map = $("treemap");
  const HEADER = 22;
  const DEEPEST = 3;
  const MOST_BOXES = 3000;
  const LEAST = 3;
  let here = root;
  let boxes = [];
  let matches = null;

  const about = (node) => {
    const lines = [`${size(node.bytes)}, ${percent(node.bytes, here.bytes)} of ${here.name}`];
    if (node.children) lines.push(counted(node.leaves, "file"));
    else {
      if (node.file !== undefined) {
        lines.push(`${size(node.disk)} on disk, shared by ${number(names.get(node.file).length)} names shown here`);
      } else if (node.size !== undefined && size(node.size) !== size(node.bytes)) {
        lines.push(`Apparent size ${size(node.size)}`);
      }
      lines.push(STATES[node.state]);
      if (node.path) lines.push(node.path);
    }
    return lines;
  };

  const tip = $("tip");
  const showTip = (node, x, y) => {
    tip.replaceChildren(make("b", { text: node.name }), ...about(node).map((text) => make("span", { text })));
    tip.hidden = false;
    const area = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - area.width - 8))}px`;
    tip.style.top = `${y + 18 + area.height > innerHeight ? Math.max(8, y - area.height - 10) : y + 18}px`;
  };
  const hideTip = () => { tip.hidden = true; };

  const add = (node, x, y, width, height, kind) => {
    const box = make("div", {
      class: `box ${kind}`, role: "button", tabindex: "-1",
      "aria-label": `${node.name}: ${about(node).join("; ")}`,
    });
    Object.assign(box.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
    box.node = node;
    map.append(box);
    boxes.push(box);
    return box;
  };

  /** The state of most of the bytes in it: how a group looks that is too small to be opened. */
  const mostly = ({ states }) => Object.keys(states).reduce((a, b) => (states[b] > states[a] ? b : a));

  const little = (width, height) => (Math.min(width, height) < 18 ? " tiny" : "");

  const draw = (node, x, y, width, height, depth) => {
    if (width < LEAST || height < LEAST || boxes.length >= MOST_BOXES) return;
    if (node.children) {
      const opens = depth < DEEPEST && width >= 70 && height >= 60;
      const box = add(node, x, y, width, height, opens ? `group${depth ? " deep" : ""}` : `group ${mostly(node)}${little(width, height)}`);
      if (width >= 54 && height >= 20) {
        box.append(make("span", { class: "name" },
          make("span", { text: node.name }), width >= 130 ? make("b", { text: size(node.bytes) }) : null));
      }
      if (!opens) return;
      const edge = depth ? 2 : 3;
      squarify(node.children.filter((child) => child.bytes > 0),
        x + edge, y + HEADER, width - 2 * edge, height - HEADER - edge,
        (child, ...rect) => draw(child, ...rect, depth + 1));
      return;
    }
    const box = add(node, x, y, width, height, `${node.state}${little(width, height)}`);
    if (width >= 54 && height >= 22) {
      box.append(make("span", { class: "name", text: node.name }));
      if (height >= 40 && width >= 66) box.append(make("span", { class: "bytes", text: size(node.bytes) }));
    }
  };

  const drawMap = (focus = null) => {
    hideTip();
    boxes = [];
    map.replaceChildren();
    // The place inside the border: boxes are placed from there.
    const { clientWidth: width, clientHeight: height } = map;
    const shown = here.children.filter((child) => child.bytes > 0);
    if (!shown.length) map.append(make("p", { class: "empty", text: "There is nothing here that takes room." }));
    squarify(shown, 0, 0, width, height, (child, ...rect) => draw(child, ...rect, 0));
    if (boxes.length) {
      const first = boxes.find((box) => box.node === focus) || boxes[0];
      first.tabIndex = 0;
      if (focus) first.focus({ preventScroll: true });
    }
    dim();
    const trail = [];
    for (let node = here; node; node = node.parent) trail.unshift(node);
    $("crumbs").replaceChildren(...trail.flatMap((node, position) => {
      const parts = position ? [make("span", { class: "sep", text: "\u203a", "aria-hidden": "true" })] : [];
      parts.push(node === here
        ? make("span", { class: "here", "aria-current": "location", text: `${node.name}, ${size(node.bytes)}` })
        : make("button", { type: "button", text: node.name, onclick: () => go(node) }));
      return parts;
    }));
  };

  const go = (node, focus = node.children[0]) => {
    here = node;
    map.classList.add("moves");
    drawMap(focus);
    say(`${node.name}, ${size(node.bytes)}`);
  };

  const detail = (node) => {
    const others = node.file === undefined ? [] : names.get(node.file).filter((each) => each !== node);
    $("detail").replaceChildren(make("div", {},
      make("h3", { text: node.name }),
      node.path ? make("p", { class: "path", text: node.path }) : null,
      make("p", { class: "muted", text: node.disk === undefined
        ? `${size(node.bytes)}. ${STATES[node.state]}`
        : `Apparent size ${size(node.size)}, on disk ${size(node.disk)}. ${STATES[node.state]}` }),
      others.length ? make("p", { text: "The same file is also at:" }) : null,
      others.length ? make("ul", {}, ...others.slice(0, 50).map((each) => make("li", { class: "path", text: each.path }))) : null,
    ));
  };

  const choose = (node) => {
    if (node.children) go(node);
    else detail(node);
  };

  const boxOf = (event) => event.target.closest(".box");
  map.addEventListener("click", (event) => {
    const box = boxOf(event);
    if (box) choose(box.node);
  });
  map.addEventListener("pointermove", (event) => {
    const box = boxOf(event);
    if (box && event.pointerType !== "touch") showTip(box.node, event.clientX, event.clientY);
    else hideTip();
  });
  map.addEventListener("pointerleave", hideTip);
  map.addEventListener("focusin", (event) => {
    const box = boxOf(event);
    if (!box || !box.matches(":focus-visible")) return;
    const area = box.getBoundingClientRect();
    showTip(box.node, area.left, Math.min(area.top + HEADER, area.bottom));
  });
  map.addEventListener("focusout", hideTip);
  const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  map.addEventListener("keydown", (event) => {
    const box = boxOf(event);
    if (!box) return;
    if (event.key === "Enter" || event.key === " ") choose(box.node);
    else if ((event.key === "Escape" || event.key === "Backspace") && here.parent) go(here.parent, here);
    else if (WAYS[event.key]) move(box, WAYS[event.key]);
    else return;
    event.preventDefault();
  });
  /** Go to the nearest box whose heading lies that way: headings, because groups contain boxes. */
  const move = (from, [right, down]) => {
    const at = (box) => ({ x: box.offsetLeft + Math.min(box.offsetWidth / 2, 40), y: box.offsetTop + 8 });
    const start = at(from);
    let best = null;
    let least = Infinity;
    for (const box of boxes) {
      if (box === from) continue;
      const { x, y } = at(box);
      const ahead = (x - start.x) * right + (y - start.y) * down;
      const aside = Math.abs((x - start.x) * down) + Math.abs((y - start.y) * right);
      if (ahead > 1 && ahead + 2 * aside < least) { least = ahead + 2 * aside; best = box; }
    }
    if (!best) return;
    from.tabIndex = -1;
    best.tabIndex = 0;
    best.focus();
  };

  const dim = () => {
    for (const box of boxes) box.classList.toggle("dim", matches !== null && !matches.has(box.node));
  };
  const find = (words) => {
    if (!words.length) { matches = null; return; }
    matches = new Set();
    const visit = (node, above) => {
      const text = `${above}/${node.path || node.name}`.toLowerCase();
      let found = words.every((word) => text.includes(word));
      for (const child of node.children || []) found = visit(child, text) || found;
      if (found) matches.add(node);
      return found;
    };
    for (const node of root.children) visit(node, "");
  };

  const states = new Set();
  const seen = (node) => (node.children ? node.children.forEach(seen) : states.add(node.state));
  seen(root);
  $("legend").append(...Object.keys(STATES).filter((state) => states.has(state) && (state === "own" || !(state === "set" && states.has("kept"))))
    .map((state) => make("span", {}, swatch(state), STATES[state])));
  if (names.size) {
    $("legend").after(make("p", { class: "lead", text: "A file with several names is drawn at each of them, at an equal part of its size." }));
  }
  let wide = 0;
  new ResizeObserver(() => {
    if (map.clientWidth === wide) return;
    wide = map.clientWidth;
    map.classList.remove("moves");
    drawMap();
  }).observe(map);

  // what can be freed

  $("actions").append(...(data.actions.length ? data.actions.map((each) =>
    make("article", { class: "action" },
      make("div", { class: "top" }, make("h3", { text: each.title }),
        each.size === null ? null : make("span", { class: `figure ${each.certain ? "" : "maybe"}`, text: size(each.size) })),
      make("p", { text: each.text }),
      each.command ? command(each.command) : null))
    : [make("p", { class: "muted", text: "Nothing: no file is here twice, and nothing is left over." })]));

  // tables: rows are made when they come into sight, because a page may have 50,000 of them

  const ROWS = 100;
  const GROUPS = 12;
  const filters = [];
  const navigation = [["map", "Map"], ["free", "Free up"]];

  const whenSeen = (element, frame, action) =>
    new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) action();
    }, { root: frame, rootMargin: "300px" }).observe(element);

  const section = (id, short, title, lead, ...content) => {
    $("tables").append(make("section", { id, "aria-labelledby": `${id}-title` },
      make("div", { class: "head" }, make("h2", { id: `${id}-title`, text: title }),
        lead ? make("p", { class: "lead", text: lead }) : null), ...content));
    navigation.push([id, short]);
  };

  /** Rows in order, filtered, made a page at a time; `build` makes one. */
  const list = ({ rows, text, build, holder, frame, foot, noun, page }) => {
    const texts = new Map();
    const textOf = (row) => {
      if (!texts.has(row)) texts.set(row, text(row).toLowerCase());
      return texts.get(row);
    };
    let chosen = rows;
    let words = [];
    let made = 0;
    const label = make("span", {});
    const button = make("button", { type: "button", text: "Show more", onclick: () => more() });
    foot.append(label, button);
    const more = () => {
      holder.append(...chosen.slice(made, made + page).map(build));
      made = Math.min(chosen.length, made + page);
      button.hidden = made >= chosen.length;
      const which = words.length ? `${number(chosen.length)} of ${counted(rows.length, noun)} match` : counted(rows.length, noun);
      label.textContent = made < chosen.length ? `${which}, the first ${number(made)} shown` : which;
    };
    const show = () => {
      chosen = words.length ? rows.filter((row) => words.every((word) => textOf(row).includes(word))) : rows;
      made = 0;
      holder.replaceChildren();
      if (frame) frame.scrollTop = 0;
      more();
    };
    filters.push((now) => { words = now; show(); });
    show();
    if (frame) whenSeen(foot, frame, () => { if (made && made < chosen.length) more(); });
    return (compare) => { rows = [...rows].sort(compare); show(); };
  };

  const table = (id, short, title, lead, rows, columns, noun, first) => {
    if (!rows.length) return;
    const body = make("tbody");
    const foot = make("div", { class: "foot" });
    const heads = columns.map((column) => make("th", { scope: "col", class: column.number ? "number" : "" }));
    const frame = make("div", { class: "frame", tabindex: "0", role: "region", "aria-label": title },
      make("table", {}, make("thead", {}, make("tr", {}, ...heads)), body), foot);
    const sort = list({
      rows, holder: body, frame, foot, noun, page: ROWS,
      text: (row) => columns.map((column) => (column.text ? column.text(row) : "")).join("\n"),
      build: (row) => make("tr", {}, ...columns.map((column) => {
        const cell = make("td", { class: `${column.number ? "number" : ""} ${column.class || ""}` });
        const content = column.cell ? column.cell(row) : (column.show || column.text)(row);
        cell.append(content);
        return cell;
      })),
    });
    const order = (column, position, down) => {
      heads.forEach((head, at) => {
        if (at === position) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const sign = down ? -1 : 1;
      const key = column.key;
      sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        return sign * (typeof x === "string" ? x.localeCompare(y) : x - y);
      });
    };
    columns.forEach((column, position) => {
      const head = heads[position];
      if (!column.key) {
        head.classList.add("plain");
        head.append(column.title || make("span", { class: "hidden", text: "Bar" }));
        return;
      }
      head.append(make("button", { type: "button", text: column.title, onclick: () => {
        const now = head.getAttribute("aria-sort");
        order(column, position, now ? now === "ascending" : Boolean(column.number));
      } }));
    });
    order(columns[first], first, Boolean(columns[first].number));
    section(id, short, title, lead, frame);
  };
  const words = (title, of, extra = {}) => ({ title, text: of, key: (row) => of(row).toLowerCase(), ...extra });
  const bytes = (title, of) => ({ title, number: true, key: of, show: (row) => size(of(row)), text: null });
  const count = (title, of) => ({ title, number: true, key: of, show: (row) => number(of(row)), text: null });
  const time = (title, of, show) => ({ title, number: true, key: (row) => Date.parse(of(row)) || 0, show: (row) => show(of(row)), text: null });
  const runs = (title, of) => ({ title, cell: (row) => command(of(row)) });

  const longest = Math.max(1, ...data.folders.map((each) => each.logical));
  const bar = (each) => {
    const track = make("div", { class: "track", role: "img",
      "aria-label": `apparent ${size(each.logical)}, on disk ${size(each.physical)}: only here ${size(each.only)}, shared ${size(each.shared)}; duplicate ${size(each.freeable)}` });
    const part = (kind, value) => {
      if (value <= 0) return;
      const piece = make(kind === "apparent" ? "span" : "i", { class: kind });
      piece.style.width = `${(100 * value) / longest}%`;
      track.append(piece);
    };
    const free = Math.min(each.freeable, each.only);
    part("apparent", each.logical);
    part("own", each.only - free);
    part("duplicate", free);
    part("shared", each.shared);
    return track;
  };
  table("folders", "Folders", "Folders",
    "Apparent is what the names add up to. On disk counts each file once: the part that only this folder has, and the part it shares with other folders or with smartcache. The dashed part of a bar takes no room.",
    data.folders, [
      words("Folder", (row) => `${row.program} ${row.path}`, { class: "text", cell: (row) => make("div", {},
        row.program ? make("div", { text: row.program }) : null, make("div", { class: "paths muted", text: row.path })) }),
      { title: "", class: "bars", cell: bar },
      count("Files", (row) => row.files),
      bytes("Apparent", (row) => row.logical),
      bytes("On disk", (row) => row.physical),
      bytes("Only here", (row) => row.only),
      bytes("Shared", (row) => row.shared),
      bytes("Duplicate", (row) => row.freeable),
    ], "folder", 4);

  const duplicate = (each) => {
    const copies = each.copies.map((one) =>
      make("li", {}, make("span", { class: `role ${one.role === "stays" ? "stays" : ""}`, text: one.role }),
        make("span", {}, make("span", { class: "paths", text: one.path }), one.program ? make("span", { class: "muted", text: ` ${one.program}` }) : null)));
    const inside = make("div", { class: "inside" }, make("ul", {}, ...copies.slice(0, 200)));
    if (copies.length > 200) inside.append(make("p", { class: "muted", text: `... and ${number(copies.length - 200)} more` }));
    if (each.reasons.length) inside.append(make("p", { class: "muted", text: `Left alone: ${each.reasons.join("; ")}.` }));
    if (each.command) inside.append(make("p", { class: "muted", text: "Replaces this one, and whatever else is twice in these folders; shows its plan and asks first:" }), command(each.command));
    else if (each.elsewhere) inside.append(make("p", { class: "muted", text: "These lie on different filesystems: links cannot free anything here." }));
    return make("details", { class: "dup" },
      make("summary", {},
        make("span", { class: "title", text: each.name }),
        make("span", { class: "gain", text: each.freeable ? `${size(each.freeable)} to free`
          : each.elsewhere ? `${size(each.elsewhere)} elsewhere` : `${size(each.left)} left alone` }),
        make("span", { class: "about", text: `${size(each.size)}, ${counted(each.copies.length, "path")}` })),
      inside);
  };
  if (data.groups.length) {
    const holder = make("div", { class: "groups" });
    const foot = make("div", { class: "foot" });
    const sort = list({
      rows: data.groups, holder, frame: null, foot, noun: "group", page: GROUPS, build: duplicate,
      text: (each) => [each.name, ...each.copies.map((one) => `${one.path} ${one.program}`)].join("\n"),
    });
    const ORDERS = [
      ["Most to free", (a, b) => b.freeable - a.freeable],
      ["Size", (a, b) => b.size - a.size],
      ["Copies", (a, b) => b.copies.length - a.copies.length],
      ["Name", (a, b) => a.name.localeCompare(b.name)],
    ];
    const buttons = ORDERS.map(([label, compare], position) =>
      make("button", { type: "button", text: label, "aria-pressed": String(!position), onclick: (event) => {
        for (const each of buttons) each.setAttribute("aria-pressed", String(each === event.currentTarget));
        sort(compare);
      } }));
    if (data.more_groups) foot.append(make("span", { text: `${counted(data.more_groups, "smaller group")} not in this page; smartcache scan --all shows them` }));
    section("duplicates", "Duplicates", "Duplicates", "The same bytes stored more than once. Open a group for its paths and the command that replaces its duplicates with links.",
      make("div", { class: "sorts", role: "group", "aria-label": "Order" }, ...buttons), holder, foot);
  }

  const tags = (values) => make("div", { class: "tags" }, ...values.map((text) => make("span", { class: "tag", text })));
  table("components", "Shared", "Shared components", "Parts of models that several repos use. Each is on the disk once.", data.components, [
    words("Component", (row) => row.name, { class: "text" }),
    { title: "Repos", text: (row) => row.repos.join(" "), cell: (row) => tags(row.repos), key: (row) => row.repos.length },
    count("Files", (row) => row.files),
    bytes("On disk", (row) => row.size),
    { ...bytes("Saved", (row) => row.size * (row.repos.length - 1)) },
  ], "component", 4);

  table("repos", "Repos", "Hugging Face repos", "Own comes back when the repo is removed. Shared stays, because something else has it too.", data.repos, [
    words("Repo", (row) => row.name, { class: "text" }),
    bytes("Size", (row) => row.size),
    bytes("Own", (row) => row.own),
    bytes("Shared", (row) => row.shared),
    time("Last read", (row) => row.accessed, ago),
    runs("Remove it", (row) => row.command),
  ], "repo", 2);

  table("tensors", "Tensors", "Computed tensors", "Sets of artifacts. Live is what is wanted, and prune frees what is past its time or dead.", data.sets, [
    words("Set", (row) => (row.problem ? `${row.name}: ${row.problem}` : row.name), { class: "text" }),
    count("Artifacts", (row) => row.artifacts),
    bytes("On disk", (row) => row.on_disk),
    bytes("Live", (row) => row.live),
    bytes("Prune frees", (row) => row.reclaimable),
    time("Made", (row) => row.created, day),
    time("Last used", (row) => row.used, ago),
  ], "set", 2);

  table("files", "Files", "All files", "Every name of every file. A file with several names is on the disk once.", files, [
    words("File", (row) => row.path, { class: "path" }),
    words("Program", (row) => row.top.name),
    bytes("Apparent", (row) => row.size),
    bytes("On disk", (row) => row.disk),
    { title: "State", text: (row) => SHORT[row.state], key: (row) => SHORT[row.state],
      cell: (row) => make("span", { class: "state" }, swatch(row.state), SHORT[row.state]) },
  ], "file", 3);

  $("nav").append(...navigation.map(([id, text]) => make("a", { href: `#${id}`, text })));
  $("footer").textContent = `Made by smartcache ${data.version}. This page is one file: it asks no server for anything.`;

  // search

  const search = $("search");
  let timer = 0;
  search.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const now = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const filter of filters) filter(now);
      find(now);
      dim();
      if (now.length) say(`${counted(files.filter((each) => matches.has(each)).length, "file")} match`);
    }, 120);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea")) return;
    event.preventDefault();
    search.focus();
  });
})();
