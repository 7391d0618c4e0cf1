"use strict";
(() => {
  const { charts, themes } = JSON.parse(document.getElementById("vitscale-data").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const options = {
    mode: "vega-lite",
    renderer: "svg",
    actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
  };

  function draw() {
    const theme = dark.matches ? themes.dark : themes.light;
    for (const place of document.querySelectorAll("[data-chart]")) {
      // A spec of its own each time: Vega-Embed keeps what it is given.
      const spec = { ...structuredClone(charts[place.dataset.chart]), config: { ...theme, background: "transparent" } };
      vegaEmbed(place, spec, { ...options, downloadFileName: place.dataset.chart }).catch((error) => {
        place.textContent = `This chart could not be drawn: ${error.message}. Its figures are in the text below it.`;
      });
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
