"use strict";
(() => {
  const given = JSON.parse(document.getElementById("given").textContent);
  const form = document.getElementById("form"), results = document.getElementById("results");
  const fields = [...form.elements].filter((one) => one.name);
  const root = document.documentElement.dataset;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const hue = (colour) => (system.matches ? (given.dark[colour] ?? colour) : colour);

  // Elements are made, never parsed: no text of an answer can be markup.
  const SVG = "http://www.w3.org/2000/svg";
  const make = (name, attributes = {}, ...inner) => {
    const one = "svg rect line path text title defs pattern".split(" ").includes(name)
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "click") one.addEventListener("click", value); else one.setAttribute(key, value);
    }
    one.append(...inner);
    return one;
  };
  const bytes = (size) => `${(size / 2 ** 30).toFixed(1)} GiB`;
  const seconds = (time) => (time >= 1 ? `${time.toPrecision(3)} s` : `${(time * 1e3).toPrecision(3)} ms`);
  const count = (n) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(n);
  const table = (heads, rows) => make("div", { class: "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => cell instanceof Node
      ? make("td", {}, cell) : make("td", /^[\d.+-]/.test(cell) ? { class: "n" } : {}, cell)))))));
  const key = (pairs) => make("ul", { class: "key" }, ...pairs.map(([name, { fill, stripe }]) => {
    const dot = make("i");
    dot.style.background = stripe
      ? `repeating-linear-gradient(45deg, ${hue(fill)} 0 3px, ${hue(stripe)} 3px 5px)` : hue(fill);
    return make("li", {}, dot, name);
  }));
  // What has stripes is filled by a pattern, which the picture that it is in defines.
  const drawn = (picture, { fill, stripe }) => {
    if (!stripe) return hue(fill);
    const id = `stripes-${[fill, stripe].join("-").replaceAll("#", "")}-${(drawn.made = (drawn.made ?? 0) + 1)}`;
    picture.append(make("defs", {}, make("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      make("rect", { width: 6, height: 6, fill: hue(fill) }), make("rect", { width: 2, height: 6, fill: hue(stripe) }))));
    return `url(#${id})`;
  };
  const fills = (picture) => {
    const known = new Map();
    return (look) => known.get(look) ?? known.set(look, drawn(picture, look)).get(look);
  };

  // The state is the question: words of the command line, layouts to show, numbers of devices.
  let shown = [];
  const words = () => [
    ...fields.filter((one) => one.name.includes(".") && one.value.trim() && (one.type !== "checkbox" || one.checked))
      .map((one) => `${one.name}=${one.value.trim()}`),
    ...form.elements.other.value.split(/\s+(?=[a-z_.]+=)/).map((one) => one.trim()).filter(Boolean),
  ];
  const labels = () => [...new Set([...shown, form.elements.why.value.trim()].filter(Boolean))].slice(-2);
  const fill = (list, show) => {
    for (const one of fields) if (one.type === "checkbox") one.checked = false; else one.value = "";
    const rest = [];
    for (const word of list) {
      const at = word.indexOf("="), name = word.slice(0, at), value = word.slice(at + 1);
      const field = fields.find((one) => one.name === name);
      const is = field && (field.type === "checkbox" ? field.value === value
        : field.tagName !== "SELECT" || [...field.options].some((one) => one.value === value));
      if (!is) rest.push(word); else if (field.type === "checkbox") field.checked = true; else field.value = value;
    }
    form.elements.other.value = rest.join(" ");
    shown = show;
  };
  const toAddress = () => {
    const state = new URLSearchParams();
    for (const word of words()) state.append("w", word);
    for (const label of labels()) state.append("show", label);
    history.replaceState(null, "", `#${state}`);
  };
  const fromAddress = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    fill(state.has("w") ? state.getAll("w") : given.words, state.getAll("show"));
  };

  // Pictures
  const memory = (one, limit) => {
    const most = Math.max(limit, ...one.ranks.map((rank) => rank.total)), row = 24;
    const picture = make("svg", { viewBox: `0 0 600 ${one.ranks.length * row + 4}`, role: "img", "aria-label": "Memory by part on each pipeline rank; the numbers are in the table" });
    const paint = fills(picture);
    one.ranks.forEach((rank, at) => {
      picture.append(make("text", { x: 0, y: at * row + 15 }, `rank ${rank.rank}`));
      let from = 60;
      for (const [name, size] of Object.entries(part(rank.bytes))) {
        const width = (size / most) * 530;
        picture.append(make("rect", { x: from, y: at * row + 3, width, height: row - 7, fill: paint(given.memory[name]) },
          make("title", {}, `${name} ${bytes(size)}`)));
        from += width;
      }
    });
    const x = 60 + (limit / most) * 530;
    picture.append(make("line", { x1: x, x2: x, y1: 0, y2: one.ranks.length * row, stroke: "currentColor", "stroke-dasharray": "4 3" },
      make("title", {}, `limit ${bytes(limit)}`)));
    return picture;
  };
  const OF = { weights: "parameters", optimizer: "optimizer", gradients: "gradients", gathered: "gathered",
    "communication buffers": "buffers", context: "fixed", communicators: "fixed", allocator: "fixed" };
  const part = (held) => {
    const sums = {};
    for (const name of Object.keys(given.memory)) sums[name] = 0;
    for (const [name, size] of Object.entries(held)) sums[OF[name] ?? "activations"] += size;
    return Object.fromEntries(Object.entries(sums).filter(([, size]) => size > 0));
  };
  const timeline = (one) => {
    const row = 18, { ranks, total, actions_end: end } = one.timeline;
    const picture = make("svg", { viewBox: `0 0 600 ${ranks.length * row + 16}`, role: "img", "aria-label": "The actions of each pipeline rank over the step" });
    const paint = fills(picture);
    ranks.forEach((spans, at) => {
      picture.append(make("text", { x: 0, y: at * row + 13 }, String(at)));
      for (const [kind, from, to, stage, microbatch] of spans) {
        const colours = given.actions[kind[0]] ?? given.actions.F;
        picture.append(make("rect", { x: 20 + (from / total) * 575, y: at * row + 2, width: Math.max(((to - from) / total) * 575, 0.3),
          height: row - 4, fill: paint(colours[Math.floor(stage / ranks.length) % 2]) },
          make("title", {}, `${kind} of stage ${stage}, microbatch ${microbatch}: ${seconds(to - from)}`)));
      }
      picture.append(make("rect", { x: 20 + (end / total) * 575, y: at * row + 2, width: ((total - end) / total) * 575, height: row - 4, fill: paint(given.causes.optimizer) },
        make("title", {}, `sums of gradients and update: ${seconds(total - end)}`)));
    });
    picture.append(make("text", { x: 20, y: ranks.length * row + 13 }, `0 to ${seconds(total)}`));
    return picture;
  };
  const causes = (one) => {
    const picture = make("svg", { viewBox: "0 0 600 24", role: "img", "aria-label": "The step by cause; the numbers are in the table" });
    const paint = fills(picture);
    let from = 0;
    for (const [name, time] of Object.entries(one.seconds)) {
      const width = (time / one.step_time_s) * 600;
      picture.append(make("rect", { x: from, y: 2, width, height: 18, fill: paint(given.causes[name]) }, make("title", {}, `${name} ${seconds(time)}`)));
      from += width;
    }
    return picture;
  };
  const curve = (points) => {
    const fits = points.filter((one) => one.fits);
    const most = Math.max(...fits.map((one) => one.tokens_per_s), 1), last = Math.max(...points.map((one) => one.devices));
    const at = (one) => [50 + (Math.log2(one.devices) / Math.max(Math.log2(last), 1)) * 530, 150 - (one.tokens_per_s / most) * 135];
    const picture = make("svg", { viewBox: "0 0 600 180", role: "img", "aria-label": "Tokens a second by the number of devices; the numbers are in the table" });
    picture.append(make("path", { d: fits.map((one, index) => `${index ? "L" : "M"}${at(one).join(" ")}`).join(""), fill: "none", stroke: hue(given.causes.compute.fill), "stroke-width": 2 }));
    for (const one of fits) {
      const [x, y] = at(one);
      picture.append(make("rect", { x: x - 3, y: y - 3, width: 6, height: 6, fill: hue(given.causes.compute.fill) }, make("title", {}, `${one.devices}: ${count(one.tokens_per_s)} tokens/s, ${one.label}`)),
        make("text", { x: x - 8, y: 170 }, String(one.devices)));
    }
    return [picture, table(["devices", "layout", "tokens/s", "MFU", "days for 1T"], points.map((one) => one.fits
      ? [String(one.devices), one.label, count(one.tokens_per_s), `${(one.mfu * 100).toFixed(1)}%`, one.takes.days.toPrecision(3)]
      : [String(one.devices), "no layout fits", "–", "–", "–"]))];
  };

  const side = (one, limit) => {
    const box = make("section", { "aria-label": one.label }, make("h3", {}, one.label), make("p", { class: "why" }, `Why not: ${one.why_not}`));
    if (one.refused) return box;
    const [low, high] = one.step_time_interval_s, [least, most] = one.peak_memory_interval_bytes;
    box.append(
      make("p", {}, `${seconds(one.step_time_s)} a step (four of five between ${seconds(low)} and ${seconds(high)}), ${count(one.tokens_per_s)} tokens/s, MFU ${(one.mfu * 100).toFixed(1)}%, ${bytes(one.peak_memory_bytes)} of ${bytes(limit)} (four of five between ${bytes(least)} and ${bytes(most)})`),
      ...one.warnings.map((text) => make("p", { class: "hint" }, text)),
      make("h3", {}, "Memory of each rank"), memory(one, limit),
      key(Object.keys(given.memory).filter((name) => one.ranks.some((rank) => part(rank.bytes)[name])).map((name) => [name, given.memory[name]])),
      make("h3", {}, "The step"), causes(one), timeline(one),
      key(Object.keys(one.seconds).filter((name) => one.seconds[name] > 0).map((name) => [name, given.causes[name]])),
      make("details", {}, make("summary", {}, "Numbers"),
        table(["cause", "time"], Object.entries(one.seconds).map(([name, time]) => [name, seconds(time)])),
        table(["rank", ...Object.keys(given.memory)], one.ranks.map((rank) => [String(rank.rank), ...Object.keys(given.memory).map((name) => bytes(part(rank.bytes)[name] ?? 0))]))),
    );
    if (one.timeline.left_out) box.append(make("p", { class: "hint" }, `${one.timeline.left_out} later actions are not drawn.`));
    return box;
  };
  const copier = (text, what) => make("button", { type: "button", "data-copy": what, click: async (event) => {
    await navigator.clipboard.writeText(text);
    event.target.textContent = "Copied";
  } }, `Copy the ${what}`);

  let last = null;
  const draw = (found) => {
    last = found;
    document.getElementById("asked").textContent = `${found.asked}; ${found.considered.toLocaleString("en")} layouts considered`;
    const now = found.shown.map((one) => one.label);
    const pick = (one) => make("button", { type: "button", "aria-pressed": String(now.includes(one.label)), click: () => {
      shown = now.includes(one.label) ? now.filter((label) => label !== one.label) : [...now, one.label].slice(-2);
      form.elements.why.value = "";
      ask();
    } }, one.label);
    results.replaceChildren(
      make("h2", {}, "Layouts"),
      found.unfit ? make("p", {}, found.unfit) : make("p", { class: "hint" }, "Choose up to two, to see them side by side."),
      table(["layout", "memory", "step", "tokens/s", "MFU", "why not"], found.ranked.map((one) => [pick(one), bytes(one.peak_memory_bytes),
        seconds(one.step_time_s), count(one.tokens_per_s), `${(one.mfu * 100).toFixed(1)}%`, one.why])),
      make("div", { class: "sides" }, ...found.shown.map((one) => side(one, found.limit))),
      make("h2", {}, "Take it with you"), make("pre", { id: "command" }, found.command),
      make("div", { class: "tools" }, copier(found.command, "command"), copier(found.config, "config")),
      make("details", {}, make("summary", {}, "Config"), make("pre", {}, found.config)),
      make("h2", {}, "More and fewer devices"), make("div", { id: "curve" }),
      make("details", {}, make("summary", {}, "Ruled out"), table(["reason", "layouts"], Object.entries(found.ruled_out).map(([why, n]) => [why, n.toLocaleString("en")]))),
    );
    if (found.points) document.getElementById("curve").append(...curve(found.points));
  };

  const post = async (deed, question, signal) => {
    const response = await fetch(`/api/${deed}`, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
    const found = await response.json();
    if (found.error) throw new Error(found.error);
    return found.answer;
  };
  const error = document.getElementById("error");
  let asking = null, waiting = 0;
  const ask = async () => {
    if (given.frozen) return;
    clearTimeout(waiting);
    asking?.abort();
    const mine = (asking = new AbortController()), began = performance.now();
    toAddress();
    results.setAttribute("aria-busy", "true");
    const question = { words: words(), show: labels() };
    try {
      const found = await post("plan", question, mine.signal);
      error.hidden = true;
      draw(found);
      root.took = String(Math.round(performance.now() - began));
      root.drawn = String(Number(root.drawn ?? 0) + 1);
      results.setAttribute("aria-busy", "false");
      const devices = Math.max(...found.ranked.map((one) => Object.values(one.layout).slice(0, 5).reduce((a, b) => a * b)), 8);
      found.points = (await post("devices", { words: question.words, first: Math.max(1, Math.floor(devices / 8)), last: devices }, mine.signal)).points;
      document.getElementById("curve").append(...curve(found.points));
      root.curve = root.drawn;
    } catch (raised) {
      if (raised.name === "AbortError") return;
      results.setAttribute("aria-busy", "false");
      error.textContent = raised.message;
      error.hidden = false;
      root.refused = String(Number(root.refused ?? 0) + 1);
    }
  };
  const soon = () => { clearTimeout(waiting); waiting = setTimeout(ask, 120); };

  // A model's config.json, chosen or dropped, alone or within its folder
  const take = async (file) => {
    try {
      const found = await post("model", JSON.parse(await file.text()));
      fill([...words().filter((word) => !word.startsWith("model.")), ...found.words], []);
      ask();
    } catch (raised) {
      error.textContent = `${file.name}: ${raised.message}`;
      error.hidden = false;
    }
  };
  document.getElementById("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    const entry = event.dataTransfer.items[0]?.webkitGetAsEntry?.();
    if (entry?.isDirectory) entry.getFile("config.json", {}, (one) => one.file(take), () => { error.textContent = "the folder has no config.json"; error.hidden = false; });
    else if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
  });

  for (const [id, names] of [["presets", given.presets], ["devices", given.devices]]) {
    document.getElementById(id).append(...names.map((name) => make("option", { value: name })));
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  form.addEventListener("input", (event) => { if (event.target.name !== "why") shown = []; soon(); });
  system.addEventListener("change", () => last && draw(last));
  if (given.frozen) {
    form.hidden = true;
    draw(given.frozen);
    root.drawn = "1";
  } else {
    addEventListener("hashchange", () => { fromAddress(); ask(); });
    fromAddress();
    ask();
  }
})();
