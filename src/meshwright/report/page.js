"use strict";
(async () => {
  const root = document.documentElement;
  const read = (id) => document.getElementById(id).textContent;
  const unpack = async (id) => {
    const letters = atob(read(id));
    const bytes = new Uint8Array(letters.length);
    for (let at = 0; at < letters.length; at++) bytes[at] = letters.charCodeAt(at);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  const toDark = JSON.parse(read("dark"));
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // what the switch says, over what the system prefers
  const isDark = () => (chosen ?? (system.matches ? "dark" : "light")) === "dark";

  // Figures are made in the light theme: in the dark one each colour has another one in its place.
  const themed = (value, dark) => {
    if (typeof value === "string") return dark ? (toDark[value] ?? value) : value;
    if (Array.isArray(value)) return value.map((inner) => themed(inner, dark));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, dark)]));
    }
    return value;
  };

  const plots = [...document.querySelectorAll(".plot")];
  const [code, data] = await Promise.all([unpack("plotly-code"), unpack("figures")]);
  const script = document.createElement("script");
  script.textContent = code;
  document.head.append(script);
  const figures = JSON.parse(data);
  const narrow = () => innerWidth < 640;
  const config = {
    responsive: true, displaylogo: false, displayModeBar: "hover", doubleClick: "reset",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    // Plotly would offer to upload each chart to a cloud; a page sends nothing anywhere.
    showSendToCloud: false, plotlyServerURL: "",
  };

  const draw = async (plot, width, dark = isDark()) => {
    const all = figures[plot.dataset.figure];
    const { data, layout } = themed(structuredClone(all[Number(plot.dataset.chosen ?? 0)]), dark);
    const back = getComputedStyle(root).getPropertyValue("--panel").trim();
    layout.hoverlabel.bgcolor = back;
    layout.hoverlabel.font.color = getComputedStyle(root).getPropertyValue("--ink").trim();
    layout.dragmode = layout.dragmode ?? (narrow() ? false : "zoom");
    if (width) layout.width = width;
    if (layout.meta?.highest) {
      // Room for the values at the ends of bars: what is left of the width beside the labels.
      const room = (width ?? plot.clientWidth) - layout.meta.label * 6.3 - 26;
      const bar = Math.max(room - layout.meta.value * 6.9 - 12, room * 0.25);
      layout.xaxis.range = [0, (layout.meta.highest * room) / bar];
      layout.xaxis.nticks = Math.max(2, Math.round(bar / 90));
    }
    plot.style.height = layout.height + "px";
    // Between the many bars of a narrow picture there is no room for lines.
    if (narrow()) for (const one of data) if (one.marker?.line?.width < 1) one.marker.line.width = 0;
    layout.uirevision = "kept"; // what was zoomed into stays in sight
    const soft = getComputedStyle(root).getPropertyValue("--soft").trim();
    layout.modebar = { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: layout.hoverlabel.font.color };
    await Plotly.react(plot, data, layout, config);
    // Buttons that show under the mouse alone are no stops for keys, which have the page's buttons;
    // the drawing is told by its label and its table.
    for (const one of plot.querySelectorAll(".modebar-btn")) one.tabIndex = -1;
    for (const one of plot.querySelectorAll("svg.main-svg")) one.setAttribute("aria-hidden", "true");
  };

  const keys = (dark = isDark()) => {
    for (const one of document.querySelectorAll("[data-fill]")) {
      one.style.setProperty("--fill", themed(one.dataset.fill, dark));
      one.style.setProperty("--stripe", themed(one.dataset.stripe, dark));
    }
  };
  const drawAll = async (width, dark) => {
    for (const plot of plots) await draw(plot, width, dark);
  };

  let known = innerWidth;
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      if (innerWidth !== known) drawAll();
      known = innerWidth;
    }, 120);
  });

  // The theme
  const button = document.getElementById("theme");
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Switch to light" : "Switch to dark");
    button.setAttribute("aria-pressed", String(isDark()));
  };
  const change = async () => {
    if (chosen) root.dataset.theme = chosen;
    name();
    keys();
    await drawAll();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    change();
  });
  system.addEventListener("change", change);
  name();
  keys();

  // Choice of a rank, and zoom by buttons
  for (const select of document.querySelectorAll("select[data-for]")) {
    select.addEventListener("change", () => {
      const plot = document.getElementById(select.dataset.for);
      plot.dataset.chosen = select.value;
      draw(plot);
    });
  }
  const moved = ([low, high], deed, [first, last]) => {
    const width = high - low, middle = (low + high) / 2;
    if (deed === "in") return [middle - width / 4, middle + width / 4];
    if (deed === "left") return [Math.max(first, low - width / 2), Math.max(first, low - width / 2) + width];
    if (deed === "right") return [Math.min(last, high + width / 2) - width, Math.min(last, high + width / 2)];
    if (deed === "out") return [Math.max(first, middle - width), Math.min(last, middle + width)];
    return [first, last];
  };
  for (const one of document.querySelectorAll("button[data-for]")) {
    one.addEventListener("click", () => {
      const plot = document.getElementById(one.dataset.for);
      const whole = figures[plot.dataset.figure][Number(plot.dataset.chosen ?? 0)].layout.xaxis.range;
      const range = moved(plot.layout.xaxis.range, one.dataset.do, whole);
      Plotly.relayout(plot, { "xaxis.range": range });
    });
  }

  // Paper is white and narrower than a screen; what is folded away stays in the file
  addEventListener("beforeprint", () => {
    root.dataset.theme = "light";
    keys(false);
    for (const plot of plots) draw(plot, plot.closest(".grid") ? 330 : 690, false);
  });
  addEventListener("afterprint", () => {
    if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme;
    keys();
    for (const plot of plots) draw(plot);
  });

  // What is in sight comes first; between charts the page answers.
  const isSeen = (plot) => plot.getBoundingClientRect().top < innerHeight;
  const pause = () => new Promise((done) => setTimeout(done));
  plots.sort((one, other) => isSeen(other) - isSeen(one));
  for (const plot of plots) {
    if (!isSeen(plot)) {
      root.dataset.usable ??= String(Math.round(performance.now()));
      await pause();
    }
    await draw(plot);
    plot.dataset.drawn = "yes";
  }
  root.dataset.usable ??= String(Math.round(performance.now()));
  root.dataset.ready = String(Math.round(performance.now()));
})();
