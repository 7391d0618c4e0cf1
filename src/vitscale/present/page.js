"use strict";
// Draws each figure's views with Vega. Without this script a page shows the first view of each as a still picture.
(async () => {
  const unpack = async (id) => {
    const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  };
  if (!window.DecompressionStream) return; // an older browser: the still pictures stay
  const { figures, themes } = JSON.parse(await unpack("vitscale-data"));
  const library = document.createElement("script");
  library.textContent = await unpack("vitscale-library");
  document.head.append(library);

  const NARROW = 480;
  const PRINTED = 3; // first folded parts that are opened for paper, besides the findings; others stay as the reader left them
  const BUTTONS = 5; // most options that stand as buttons, of at most LETTERS letters; more become a list
  const LETTERS = 100;
  const SHAPES = {
    circle: "M7 2a5 5 0 1 0 .01 0z", square: "M2 2h10v10h-10z", "triangle-up": "M7 2l6 10h-12z",
    diamond: "M7 1l5 6-5 6-5-6z", cross: "M5 1h4v4h4v4h-4v4h-4v-4h-4v-4h4z", "triangle-down": "M7 12l6-10h-12z",
    "triangle-right": "M12 7l-10 6v-12z",
  };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const states = new Map();

  const element = (name, properties = {}, ...children) => {
    const made = Object.assign(document.createElement(name), properties);
    made.append(...children);
    return made;
  };

  // State: {"scaling.measure": "speedup", "scaling.off": "0.2"}; what is not ours is not kept.
  function told() {
    const text = location.hash.slice(1);
    return text.includes("=") ? new URLSearchParams(text) : new URLSearchParams();
  }

  function read(name) {
    const figure = figures[name];
    const asked = told();
    const wanted = {};
    for (const [control, key] of Object.entries(figure.controls)) {
      const value = asked.get(`${name}.${key}`);
      if (figure.views.some((view) => view.choices[control]?.[0] === value)) wanted[control] = value;
    }
    const off = new Set();
    for (const place of (asked.get(`${name}.off`) ?? "").split(".")) {
      if (/^\d+$/.test(place) && Number(place) < figure.series.length) off.add(figure.series[Number(place)]);
    }
    return { view: nearest(figure, wanted), off };
  }

  // The view that has most of what is wanted; what was chosen last counts above all.
  function nearest(figure, wanted, last) {
    const score = (view) => Object.entries(wanted).reduce(
      (sum, [control, value]) => sum + (view.choices[control]?.[0] === value ? (control === last ? 100 : 1) : 0), 0);
    return figure.views.reduce((best, view) => (score(view) > score(best) ? view : best), figure.views[0]);
  }

  function write() {
    const kept = new URLSearchParams();
    for (const [name, state] of states) {
      const figure = figures[name];
      for (const [control, key] of Object.entries(figure.controls)) {
        const value = state.view.choices[control]?.[0];
        if (value !== undefined && value !== figure.views[0].choices[control]?.[0]) kept.set(`${name}.${key}`, value);
      }
      const off = figure.series.flatMap((series, place) => (state.off.has(series) ? [place] : []));
      if (off.length) kept.set(`${name}.off`, off.join("."));
    }
    history.replaceState(null, "", kept.size ? `#${kept}` : location.pathname + location.search);
  }

  function control(name, label, options, chosen, choose) {
    const id = `${name}-${figures[name].controls[label]}`;
    if (options.length > BUTTONS || options.map(([, text]) => text).join("").length > LETTERS) {
      const list = element("select", { id, onchange: () => choose(list.value) });
      for (const [value, text] of options) list.append(element("option", { value, selected: value === chosen }, text));
      return element("label", { className: "control" }, `${label} `, list);
    }
    const group = element("div", { className: "control", role: "group" });
    group.setAttribute("aria-label", label);
    for (const [value, text] of options) {
      const button = element("button", { type: "button", onclick: () => choose(value) }, text);
      button.dataset.control = `${id}-${value}`;
      button.setAttribute("aria-pressed", String(value === chosen));
      group.append(button);
    }
    return group;
  }

  function controls(name, place) {
    const state = states.get(name);
    const figure = figures[name];
    const focused = document.activeElement?.dataset?.control ?? document.activeElement?.id;
    const parts = [];
    const before = {};
    for (const label of Object.keys(figure.controls)) {
      // The options that remain under the choices to the left.
      const views = figure.views.filter((view) => Object.entries(before).every(([c, v]) => view.choices[c]?.[0] === v));
      const options = new Map(views.filter((view) => view.choices[label]).map((view) => view.choices[label]));
      const chosen = state.view.choices[label]?.[0];
      if (options.size > 1) {
        parts.push(control(name, label, [...options], chosen, (value) => {
          const wanted = Object.fromEntries(Object.entries(state.view.choices).map(([c, [v]]) => [c, v]));
          state.view = nearest(figure, { ...wanted, [label]: value }, label);
          write();
          show(name);
        }));
      }
      if (chosen !== undefined) before[label] = chosen;
    }
    const legend = curves(name, state);
    if (legend) parts.push(legend);
    place.replaceChildren(...parts);
    if (focused) (place.querySelector(`[data-control="${CSS.escape(focused)}"]`) ?? place.querySelector(`#${CSS.escape(focused)}`))?.focus();
  }

  // A box for each curve of the view, with its colour and shape: it is the legend, and switches the curve off.
  function curves(name, state) {
    const layers = state.view.spec.layer ?? [];
    const scale = (channel) => layers.map((layer) => layer.encoding[channel]).find((one) => one?.field === "series")?.scale;
    const colours = scale("color");
    const shapes = scale("shape");
    if (!figures[name].series.length || !colours) return null;
    const box = element("fieldset", { className: "curves" }, element("legend", { className: "hidden" }, "curves"));
    colours.domain.forEach((series, place) => {
      const input = element("input", { type: "checkbox", checked: !state.off.has(series), onchange: () => {
        if (input.checked) state.off.delete(series); else state.off.add(series);
        if (colours.domain.every((each) => state.off.has(each))) state.off.delete(series);
        write();
        show(name);
      } });
      input.dataset.control = `${name}-curve-${place}`;
      const mark = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      mark.setAttribute("viewBox", "0 0 14 14");
      mark.setAttribute("aria-hidden", "true");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", SHAPES[shapes?.range[place]] ?? SHAPES.circle);
      path.setAttribute("fill", colours.range[place]);
      mark.append(path);
      box.append(element("label", {}, input, mark, series));
    });
    return box;
  }

  function fitted(spec, off, width, legends) {
    const made = structuredClone(spec);
    if (!made.layer) return made; // several plots beside each other: as wide as they are
    made.width = width;
    for (const rows of Object.keys(made.datasets)) {
      made.datasets[rows] = made.datasets[rows].filter((row) => !off.has(row.series));
    }
    for (const { encoding } of made.layer) {
      for (const channel of Object.values(encoding)) {
        if (legends && channel.field === "series" && channel.scale) channel.legend = null;
        if (width < NARROW && channel.legend?.columns) channel.legend.columns = channel.field === "part" ? 2 : 1;
        if (channel.axis?.labelLimit) channel.axis.labelLimit = Math.min(channel.axis.labelLimit, (width < NARROW ? 0.36 : 0.44) * width);
      }
    }
    return made;
  }

  async function draw(name, theme = dark.matches ? themes.dark : themes.light) {
    const place = document.querySelector(`[data-figure="${name}"]`);
    const state = states.get(name);
    const picture = place.querySelector(".picture");
    const width = Math.floor(picture.clientWidth);
    if (!width) return; // in a part that is folded: drawn when it opens
    try {
      const spec = fitted(state.view.spec, state.off, width, Boolean(figures[name].series.length));
      state.drawn?.finalize();
      state.width = width;
      const config = { ...theme, background: "transparent" };
      state.drawn = await vegaEmbed(picture, { ...spec, config }, { mode: "vega-lite", renderer: "svg", actions: false, logLevel: 1 });
    } catch (error) {
      picture.textContent = `This figure could not be drawn: ${error.message}. Its table is below.`;
    }
  }

  function show(name) {
    const place = document.querySelector(`[data-figure="${name}"]`);
    const { view, off } = states.get(name);
    place.querySelector("figcaption :is(h2, h3, h4)").textContent = view.title;
    place.querySelector(".subtitle").textContent = view.subtitle;
    place.querySelector(".summary").textContent = view.summary;
    place.querySelector(".picture").setAttribute("aria-label", view.summary);
    const rows = view.spec.datasets.rows.filter((row) => !off.has(row.series));
    const cells = (row) => view.columns.map(([field]) => element("td", {}, String(row[field] ?? "")));
    place.querySelector(".rows table").replaceChildren(
      element("thead", {}, element("tr", {}, ...view.columns.map(([, text]) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))),
    );
    controls(name, place.querySelector(".controls"));
    return draw(name);
  }

  function open(id) {
    const target = id && document.getElementById(id);
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target) target.scrollIntoView();
  }

  async function showAll() {
    for (const name of Object.keys(figures)) states.set(name, { ...states.get(name), ...read(name) });
    await Promise.all(Object.keys(figures).map(show));
    const asked = [...told().keys()].map((key) => key.split(".")[0]).find((name) => name in figures);
    open(asked ? `figure-${asked}` : location.hash.slice(1));
  }

  const redraw = (within = document) => {
    for (const place of within.querySelectorAll("[data-figure]")) {
      const { width } = states.get(place.dataset.figure);
      if (width !== Math.floor(place.querySelector(".picture").clientWidth)) draw(place.dataset.figure);
    }
  };
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 120); });
  addEventListener("hashchange", showAll);
  document.addEventListener("toggle", (event) => redraw(event.target), true);
  dark.addEventListener("change", () => Object.keys(figures).forEach((name) => draw(name)));
  let opened = [];
  addEventListener("beforeprint", () => {
    const parts = [...document.querySelectorAll("main > details.section")].slice(0, PRINTED);
    opened = [...parts, ...document.querySelectorAll("#can-i-trust-it details.section")].filter((part) => !part.open);
    for (const part of opened) part.open = true;
    for (const name of Object.keys(figures)) draw(name, themes.light);
  });
  addEventListener("afterprint", () => {
    for (const part of opened) part.open = false;
    for (const name of Object.keys(figures)) draw(name);
  });
  await showAll();
  document.documentElement.dataset.ready = "true";
})();
