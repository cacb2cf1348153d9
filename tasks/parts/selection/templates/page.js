(() => {
  const figure = JSON.parse(document.getElementById("pareto-data").textContent);
  const plot = document.getElementById("pareto");
  const narrow = () => window.innerWidth < 720;
  const themed = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = (given) => ({ ...given, gridcolor: colour("--rule"), linecolor: colour("--rule") });
    return {
      ...figure.layout,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--soft") },
      xaxis: axis(figure.layout.xaxis),
      yaxis: axis(figure.layout.yaxis),
      hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--rule"), align: "left",
        font: { color: colour("--ink"), size: 12 } },
      legend: narrow() ? { orientation: "h", y: -0.24, yanchor: "top" } : figure.layout.legend,
    };
  };
  const draw = () => Plotly.react(plot, figure.data, themed(), { responsive: true, displayModeBar: false });
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("(max-width: 719px)").addEventListener("change", draw);

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    }));
  }
})();
