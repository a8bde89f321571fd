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
    const one = "svg rect line path text title defs pattern clipPath".split(" ").includes(name)
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key === "click") one.addEventListener("click", value); else one.setAttribute(key, value);
    }
    one.append(...inner);
    return one;
  };
  const bytes = (size) => `${(size / 2 ** 30).toFixed(1)} GiB`;
  // toPrecision alone writes 3612 as 3.61e+3.
  const digits = (value) => (value >= 999.5 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
  const seconds = (time) => (time >= 1 ? `${digits(time)} s` : `${digits(time * 1e3)} ms`);
  const percent = (share) => `${(share * 100).toFixed(1)}%`;
  const count = (n) => Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(n);
  // A number and its unit are set right.
  const NUMBER = /^[+−-]?\d[\d.,]*\S*( \S+)?$/;
  const table = (heads, rows) => make("div", { class: "scroll", tabindex: "0" }, make("table", {},
    make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => cell instanceof Node
      ? make("td", {}, cell) : make("td", NUMBER.test(cell) ? { class: "n" } : {}, cell)))))));
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
    if (given.frozen) return;
    const state = new URLSearchParams();
    for (const word of words()) state.append("w", word);
    for (const label of labels()) state.append("show", label);
    if (form.elements.tokens.value.trim()) state.append("tokens", form.elements.tokens.value.trim());
    history.replaceState(null, "", `#${state}`);
  };
  const fromAddress = () => {
    const state = new URLSearchParams(location.hash.slice(1));
    fill(state.has("w") ? state.getAll("w") : given.words, state.getAll("show"));
    form.elements.tokens.value = state.get("tokens") ?? "";
  };

  // Pictures, as wide as the page where that is narrow, so that their texts stay readable
  const across = () => Math.min(600, results.clientWidth || 600);
  const memory = (one, limit) => {
    const most = Math.max(limit, ...one.ranks.map((rank) => rank.total)), row = 24, wide = across();
    const picture = make("svg", { viewBox: `0 0 ${wide} ${one.ranks.length * row + 18}`, role: "img", "aria-label": "Memory by part on each pipeline rank; the numbers are in the table" });
    const paint = fills(picture);
    one.ranks.forEach((rank, at) => {
      picture.append(make("text", { x: 0, y: at * row + 15 }, `rank ${rank.rank}`));
      let from = 60;
      for (const [name, size] of Object.entries(part(rank.bytes))) {
        const width = (size / most) * (wide - 70);
        picture.append(make("rect", { x: from, y: at * row + 3, width, height: row - 7, fill: paint(given.memory[name]) },
          make("title", {}, `${name} ${bytes(size)}`)));
        from += width;
      }
    });
    const x = 60 + (limit / most) * (wide - 70);
    picture.append(make("line", { x1: x, x2: x, y1: 0, y2: one.ranks.length * row, stroke: "currentColor", "stroke-dasharray": "4 3" },
      make("title", {}, `limit ${bytes(limit)}`)),
      make("text", { x: x + 3, y: one.ranks.length * row + 13, "text-anchor": "end" }, `limit ${bytes(limit)}`));
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
    const row = 18, wide = across(), { ranks, total, actions_end: end, fold } = one.timeline;
    // The middle of a long step is folded: it takes a small share of the picture.
    const [first, last] = fold ?? [total, total], gap = 0.04 * (total - last + first) * (fold ? 1 : 0);
    const x = (time) => 20 + ((time < last ? Math.min(time, first) : time - last + first + gap) / (total - last + first + gap)) * (wide - 25);
    const picture = make("svg", { viewBox: `0 0 ${wide} ${ranks.length * row + 16}`, role: "img", "aria-label": "The actions of each pipeline rank over the step" });
    const paint = fills(picture);
    ranks.forEach((spans, at) => {
      picture.append(make("text", { x: 0, y: at * row + 13 }, String(at)));
      for (const [kind, from, to, stage, microbatch] of spans) {
        const colours = given.actions[kind[0]] ?? given.actions.F;
        picture.append(make("rect", { x: x(from), y: at * row + 2, width: Math.max(x(to) - x(from), 0.3),
          height: row - 4, fill: paint(colours[Math.floor(stage / ranks.length) % 2]) },
          make("title", {}, `${kind} of stage ${stage}, microbatch ${microbatch}: ${seconds(to - from)}`)));
      }
      picture.append(make("rect", { x: x(end), y: at * row + 2, width: x(total) - x(end), height: row - 4, fill: paint(given.causes.optimizer) },
        make("title", {}, `sums of gradients and update: ${seconds(total - end)}`)));
    });
    picture.append(make("text", { x: 20, y: ranks.length * row + 13 }, `0 to ${seconds(total)}`));
    if (fold) picture.append(make("text", { x: (x(first) + x(last)) / 2, y: ranks.length * row + 13, "text-anchor": "middle" }, "…"));
    return picture;
  };
  const kinds = (one) => {
    const met = new Set(one.timeline.ranks.flatMap((spans) => spans.map(([kind]) => kind[0])));
    return Object.keys(given.actions).filter((kind) => met.has(kind))
      .map((kind) => [given.kinds[kind], given.actions[kind][0]]).concat([["sums and update", given.causes.optimizer]]);
  };
  // A step by cause, as wide as it is long beside the longest, with its interval where that fits.
  const causes = (one, longest = one.step_time_s, label = "The step by cause; the numbers are in the table") => {
    const picture = make("svg", { viewBox: "0 0 600 24", role: "img", "aria-label": label, preserveAspectRatio: "none" });
    const paint = fills(picture);
    let from = 0;
    for (const [name, time] of Object.entries(one.seconds)) {
      const width = (time / longest) * 600;
      picture.append(make("rect", { x: from, y: 2, width, height: 18, fill: paint(given.causes[name]) }, make("title", {}, `${given.names[name]} ${seconds(time)}`)));
      from += width;
    }
    if (one.step_time_interval_s[1] > longest) return picture;
    const [low, high] = one.step_time_interval_s.map((time) => (time / longest) * 600);
    const ends = `M${low} 11H${high}M${low} 6V16M${Math.min(high, 599)} 6V16`;
    for (const look of [{ stroke: "var(--paper)", "stroke-width": 5 }, { stroke: "var(--ink)", "stroke-width": 1.5 }]) {
      picture.append(make("path", { d: ends, fill: "none", class: "interval", "vector-effect": "non-scaling-stroke", ...look },
        make("title", {}, `80% interval: ${one.step_time_interval_s.map(seconds).join(" to ")}`)));
    }
    return picture;
  };
  const curve = (points) => {
    const fits = points.filter((one) => one.fits);
    const most = Math.max(...fits.map((one) => one.tokens_per_s), 1), last = Math.max(...points.map((one) => one.devices));
    const wide = across(), least = Math.log2(points[0].devices), range = Math.max(Math.log2(last) - least, 1);
    const at = (one) => [30 + ((Math.log2(one.devices) - least) / range) * (wide - 70), 150 - (one.tokens_per_s / most) * 135];
    const picture = make("svg", { viewBox: `0 0 ${wide} 200`, role: "img", "aria-label": "Tokens a second by the number of devices; the numbers are in the table" });
    const path = (points, look) => make("path", { d: points.map((point, index) => `${index ? "L" : "M"}${point.join(" ")}`).join(""), fill: "none", ...look });
    if (fits.length > 1) {
      // In step with the first: so many times the devices, so many times the tokens.
      const ideal = fits.map((one) => at({ ...one, tokens_per_s: fits[0].tokens_per_s * one.devices / fits[0].devices }));
      const clip = make("clipPath", { id: "curve-box" }, make("rect", { x: 0, y: 0, width: wide, height: 155 }));
      picture.append(make("defs", {}, clip), path(ideal, { stroke: "currentColor", "stroke-dasharray": "2 4", opacity: 0.6, "clip-path": "url(#curve-box)" }));
    }
    picture.append(path(fits.map(at), { stroke: hue(given.causes.compute.fill), "stroke-width": 2 }));
    for (const one of fits) {
      const [x, y] = at(one);
      picture.append(make("rect", { x: x - 3, y: y - 3, width: 6, height: 6, fill: hue(given.causes.compute.fill) }, make("title", {}, `${one.devices}: ${count(one.tokens_per_s)} tokens/s, ${one.label}`)),
        make("text", { x: x - 8, y: 170 }, String(one.devices)));
    }
    picture.append(make("text", { x: 0, y: 12 }, `${count(most)} tokens/s`), make("text", { x: wide / 2, y: 192, "text-anchor": "middle" }, "devices"));
    const tokens = fits[0] ? count(fits[0].takes.tokens) : "", priced = fits.some((one) => one.takes.cost !== null);
    return [picture, make("p", { class: "hint" }, "The dotted line is perfect scaling from the first number of devices."),
      table(["devices", "layout", "memory", "tokens/s", "MFU", `days for ${tokens}`, ...(priced ? ["cost"] : [])], points.map((one) => one.fits
        ? [String(one.devices), one.label, bytes(one.peak_memory_bytes), count(one.tokens_per_s), percent(one.mfu), digits(one.takes.days), ...(priced ? [count(one.takes.cost)] : [])]
        : [String(one.devices), "no layout fits", "–", "–", "–", "–", ...(priced ? ["–"] : [])]))];
  };

  const facts = (rows) => make("dl", { class: "facts" }, ...rows.map(([name, value, beside]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, beside)))));
  // What all tokens take with the best layout.
  const bill = (takes) => facts([
    ["Days", digits(takes.days), "with the best layout"],
    ["Device hours", count(takes.device_hours), "of all devices together"],
    ...(takes.cost === null ? [] : [["Cost", count(takes.cost), "at your price of a device hour"]]),
  ]);
  const capital = (text) => text[0].toUpperCase() + text.slice(1);
  const side = (one, limit) => {
    const box = make("section", { "aria-label": one.label }, make("h3", {}, one.label), make("p", { class: "why" }, one.why_not ? `Why not: ${one.why_not}` : "The best layout."));
    if (one.refused) return box;
    const [low, high] = one.step_time_interval_s, [least, most] = one.peak_memory_interval_bytes;
    const devices = one.layout.pp * one.layout.dp_replicate * one.layout.dp_shard * one.layout.cp * one.layout.tp;
    const used = Object.keys(one.seconds).filter((name) => one.seconds[name] > 0);
    box.append(
      facts([
        ["Step", seconds(one.step_time_s), `80% interval: ${seconds(low)} to ${seconds(high)}`],
        ["Tokens a second", count(one.tokens_per_s), `${count(one.tokens_per_s / devices)} a device`],
        ["MFU", percent(one.mfu), `${one.tflops_per_device.toFixed(0)} TFLOP/s a device`],
        [capital(one.peak_name), bytes(one.peak_memory_bytes), `of ${bytes(limit)}; 80% interval: ${bytes(least)} to ${bytes(most)}`],
      ]),
      ...one.warnings.map((text) => make("p", { class: "notice" }, `${capital(text)}.`)),
      make("h3", {}, "Memory of each rank"), memory(one, limit),
      key(Object.keys(given.memory).filter((name) => one.ranks.some((rank) => part(rank.bytes)[name])).map((name) => [name, given.memory[name]])),
      make("h3", {}, "The step"), causes(one), key(used.map((name) => [given.names[name], given.causes[name]])), timeline(one), key(kinds(one)),
      make("details", {}, make("summary", {}, "Numbers"),
        table(["cause", "time"], used.map((name) => [given.names[name], seconds(one.seconds[name])])),
        table(["rank", ...Object.keys(given.memory)], one.ranks.map((rank) => [String(rank.rank), ...Object.keys(given.memory).map((name) => bytes(part(rank.bytes)[name] ?? 0))]))),
    );
    if (one.timeline.left_out) box.append(make("p", { class: "hint" }, `The middle of the step, from ${seconds(one.timeline.fold[0])} to ${seconds(one.timeline.fold[1])}, is folded: ${one.timeline.left_out} actions.`));
    return box;
  };
  const copier = (text, what) => make("button", { type: "button", "data-copy": what, click: async (event) => {
    await navigator.clipboard.writeText(text);
    event.target.textContent = "Copied";
  } }, `Copy the ${what}`);

  // What is shown in detail: the answer has it, or, frozen, the choice among all that it has.
  const visible = (found) => {
    if (!given.frozen) return found.shown;
    const chosen = shown.length ? shown : found.shown.slice(0, 1).map((one) => one.label);
    return found.shown.filter((one) => chosen.includes(one.label));
  };
  const ranking = (found, now) => {
    const pick = (one) => make("button", { type: "button", "aria-pressed": String(now.includes(one.label)), click: () => {
      shown = now.includes(one.label) ? now.filter((label) => label !== one.label) : [...now, one.label].slice(-2);
      form.elements.why.value = "";
      if (given.frozen) draw(found); else ask();
    } }, one.label);
    const longest = Math.max(...found.ranked.map((one) => one.step_time_interval_s[1]));
    const used = Object.keys(given.causes).filter((name) => found.ranked.some((one) => one.seconds[name] > 0));
    const named = table(["layout", "memory", "step", "by cause", "tokens/s", "MFU", "why not"], found.ranked.map((one) => [pick(one), bytes(one.peak_memory_bytes),
      seconds(one.step_time_s), causes(one, longest, `The step of ${one.label} by cause, with its 80% interval`), count(one.tokens_per_s), percent(one.mfu), one.why]));
    named.classList.add("ranking");
    return [named, make("p", { class: "hint" }, "The line over a bar is the 80% interval of the step."),
      key(used.map((name) => [given.names[name], given.causes[name]]))];
  };
  const rests = (found) => {
    const { source, date } = found.calibration, when = date && !found.is_shipped ? `, ${date}` : "";
    return make("p", { id: "rests" }, `Calibration: ${source}${when}. ${found.has_run}`);
  };

  let last = null;
  const draw = (found) => {
    last = found;
    document.getElementById("asked").textContent = `${found.asked}; ${found.considered.toLocaleString("en")} layouts considered`;
    const sides = visible(found);
    results.replaceChildren(
      make("h2", {}, "Layouts"),
      found.unfit ? make("p", {}, found.unfit) : make("p", { class: "hint" }, "Choose up to two, to see them side by side."),
      ...(found.ranked.length ? ranking(found, sides.map((one) => one.label)) : []),
      make("div", { class: "sides" }, ...sides.map((one) => side(one, found.limit))),
      make("details", {}, make("summary", {}, "Ruled out"), table(["reason", "layouts"], Object.entries(found.ruled_out).map(([why, n]) => [why, n.toLocaleString("en")]))),
      ...(found.tokens ? [make("h2", {}, `Training on ${count(found.tokens.tokens)} tokens`), bill(found.tokens)] : []),
      ...(given.frozen && !found.points.length ? [] : [make("h2", {}, "More and fewer devices"), make("div", { id: "curve" }, ...(found.points ? [] : [make("p", { class: "hint" }, "Planning more and fewer devices …")]))]),
      make("h2", {}, "Basis"), rests(found),
      ...(found.choices.length ? [make("p", { class: "hint" }, `Chosen for the best: ${found.choices.map(([what, text]) => `${what}: ${text}`).join("; ")}.`)] : []),
      make("h2", {}, "Copy commands"),
      make("p", { class: "hint" }, "This plans the same:"), make("pre", { id: "command" }, found.command),
      ...(found.train ? [make("p", { class: "hint" }, "This trains the best layout:"), make("pre", { id: "train" }, found.train)] : []),
      make("div", { class: "tools" }, copier(found.command, "command"), ...(found.train ? [copier(found.train, "training command")] : []), copier(found.config, "config")),
      make("details", {}, make("summary", {}, "Config"), make("pre", {}, found.config)),
    );
    if (found.points?.length) document.getElementById("curve").append(...curve(found.points));
    for (const one of fields) {
      if (!(one.name in found.defaults)) continue;
      if (one.tagName === "SELECT") one.options[0].textContent = `by default ${found.defaults[one.name]}`;
      else one.placeholder = found.defaults[one.name];
    }
  };
  // Frozen, what was asked is told, not asked: the controls would have nobody to answer.
  const tell = () => {
    const asked = document.getElementById("given-words"), rows = [];
    for (const one of fields) {
      const label = one.closest("label").firstChild.textContent.trim() || one.closest("label").textContent.trim();
      if (one.name.includes(".") && (one.type === "checkbox" ? one.checked : one.value)) rows.push([label, one.value, one.name]);
    }
    for (const word of form.elements.other.value.split(/\s+(?=[a-z_.]+=)/).filter(Boolean)) {
      const at = word.indexOf("=");
      rows.push([word.slice(0, at), word.slice(at + 1), ""]);
    }
    asked.replaceChildren(...rows.map(([name, value, beside]) => make("div", {}, make("dt", {}, name), make("dd", {}, value, make("small", {}, beside)))));
    asked.hidden = !rows.length;
    form.hidden = true;
  };

  const post = async (deed, question, signal) => {
    const response = await fetch(`/api/${deed}`, { method: "POST", signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify(question) });
    const found = await response.json();
    if (found.error) throw new Error(found.error);
    return found.answer;
  };
  const error = document.getElementById("error");
  let asking = null, waiting = 0, changed = 0;
  const ask = async () => {
    clearTimeout(waiting);
    asking?.abort();
    const mine = (asking = new AbortController()), began = changed || performance.now();
    changed = 0;
    toAddress();
    results.setAttribute("aria-busy", "true");
    const question = { words: words(), show: labels() };
    try {
      const found = await post("plan", question, mine.signal);
      error.hidden = true;
      delete results.dataset.stale;
      draw(found);
      root.took = String(Math.round(performance.now() - began));
      root.drawn = String(Number(root.drawn ?? 0) + 1);
      results.setAttribute("aria-busy", "false");
      const devices = Math.max(...found.ranked.map((one) => Object.values(one.layout).slice(0, 5).reduce((a, b) => a * b)), 8);
      const asked = { words: question.words, first: Math.max(1, Math.floor(devices / 8)), last: devices, tokens: form.elements.tokens.value.trim() };
      try {
        found.points = (await post("devices", asked, mine.signal)).points;
        document.getElementById("curve").replaceChildren(...curve(found.points));
      } catch (raised) {
        if (raised.name === "AbortError") return;
        document.getElementById("curve").replaceChildren(make("p", { class: "notice" }, raised.message));
      }
      root.curve = root.drawn;
    } catch (raised) {
      if (raised.name === "AbortError") return;
      results.setAttribute("aria-busy", "false");
      error.textContent = raised.message;
      error.hidden = false;
      results.dataset.stale = ""; // what stands there answers an earlier question
      root.refused = String(Number(root.refused ?? 0) + 1);
    }
  };
  const soon = () => { clearTimeout(waiting); changed = performance.now(); waiting = setTimeout(ask, 60); };

  // A model's config.json, chosen or dropped, alone or within its folder
  const take = async (file) => {
    try {
      const found = await post("model", JSON.parse(await file.text()));
      const tokens = form.elements.tokens.value;
      fill([...words().filter((word) => !word.startsWith("model.")), ...found.words], []);
      form.elements.tokens.value = tokens;
      ask();
    } catch (raised) {
      error.textContent = `${file.name}: ${raised.message}`;
      error.hidden = false;
    }
  };
  if (!given.frozen) {
    document.getElementById("file").addEventListener("change", (event) => event.target.files[0] && take(event.target.files[0]));
    addEventListener("dragover", (event) => event.preventDefault());
    addEventListener("drop", (event) => {
      event.preventDefault();
      const entry = event.dataTransfer.items[0]?.webkitGetAsEntry?.();
      if (entry?.isDirectory) entry.getFile("config.json", {}, (one) => one.file(take), () => { error.textContent = "the folder has no config.json"; error.hidden = false; });
      else if (event.dataTransfer.files[0]) take(event.dataTransfer.files[0]);
    });
  }

  for (const [id, names] of [["presets", given.presets], ["devices", given.devices]]) {
    document.getElementById(id).append(...names.map((name) => make("option", { value: name })));
  }
  form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
  form.addEventListener("input", (event) => { if (event.target.name !== "why") shown = []; soon(); });
  system.addEventListener("change", () => last && draw(last));
  if (given.frozen) {
    fill(given.words, []);
    tell();
    draw(given.frozen);
    root.drawn = "1";
    root.ready = "";
  } else {
    addEventListener("hashchange", () => { fromAddress(); ask(); });
    fromAddress();
    ask();
  }
})();
