"""Looks and behaviour of the HTML report: constants without any content."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fcfbf9; --card: #ffffff; --ink: #1d1c1a; --soft: #6a6761; --rule: #e5e2dc;
  --accent: #2a9d72; --good: #1c7a56; --good-bg: #e3f4ec; --bad: #a63a33; --bad-bg: #fbe9e6;
  --mild: #86620c; --mild-bg: #faf0d7; --off-bg: #efede8; --heat: 42, 157, 114;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #141517; --card: #1b1d20; --ink: #eceae5; --soft: #9d9a93; --rule: #2e3135;
    --accent: #4cc497; --good: #6fd3ab; --good-bg: #17342a; --bad: #f0988f; --bad-bg: #3b1f1d;
    --mild: #e6c267; --mild-bg: #372d14; --off-bg: #26292d; --heat: 76, 196, 151;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums;
}
main { max-width: 1160px; margin: 0 auto; padding: 48px 32px 72px; }
h1 { font-size: 34px; line-height: 1.2; letter-spacing: -0.02em; font-weight: 650; margin: 0 0 10px; }
h1 .on { color: var(--soft); font-weight: 400; }
h2 { font-size: 19px; letter-spacing: -0.01em; font-weight: 620; margin: 56px 0 6px; }
p { margin: 0; max-width: 76ch; }
.soft, h2 + p { color: var(--soft); }
.eyebrow { color: var(--accent); font-size: 13px; font-weight: 600; margin: 0 0 12px; }
.figures { display: flex; flex-wrap: wrap; gap: 14px 44px; margin: 28px 0 0; padding: 0; list-style: none; }
.figures b { display: block; font-size: 27px; line-height: 1.25; letter-spacing: -0.02em; font-weight: 600; }
.figures span { color: var(--soft); font-size: 13px; }
.picks { display: grid; grid-template-columns: repeat(auto-fit, minmax(232px, 1fr)); gap: 14px;
  align-items: start; margin: 18px 0 0; }
.pick { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 16px 18px; }
.pick h3 { font-size: 14px; font-weight: 500; margin: 0 0 8px; color: var(--soft); }
.pick strong { display: block; font-size: 18px; font-weight: 600; letter-spacing: -0.01em; margin: 0 0 8px; }
.pick p { font-size: 13.5px; color: var(--soft); }
.pick.none { border-style: dashed; }
.pick p { overflow-wrap: anywhere; }
.dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; }
#pareto { height: 460px; margin: 16px 0 0; }
.scroll { overflow-x: auto; margin: 16px 0 0; -webkit-overflow-scrolling: touch; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { padding: 8px 12px; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child { padding-left: 0; position: sticky; left: 0; z-index: 1;
  background: var(--paper); }
th { font-weight: 550; color: var(--soft); white-space: nowrap; vertical-align: bottom; }
.num { text-align: right; white-space: nowrap; }
.name { white-space: nowrap; }
.name b { font-weight: 600; }
td small { display: block; color: var(--soft); font-size: 12px; }
.why { min-width: 34ch; color: var(--soft); font-size: 12.5px; }
.code { font: 12px/1.6 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  overflow-wrap: anywhere; min-width: 16ch; }
th button { all: unset; cursor: pointer; }
th button:hover { color: var(--ink); }
th button:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 2px; }
th button::after { content: ""; display: inline-block; width: 0.9em; text-align: right; }
th[aria-sort="ascending"] button::after { content: "↑"; color: var(--accent); }
th[aria-sort="descending"] button::after { content: "↓"; color: var(--accent); }
.chip { display: inline-block; padding: 1px 9px; border-radius: 20px; font-size: 12px; font-weight: 550;
  white-space: nowrap; background: var(--off-bg); color: var(--soft); }
.chip.good { background: var(--good-bg); color: var(--good); }
.chip.bad { background: var(--bad-bg); color: var(--bad); }
.chip.mild { background: var(--mild-bg); color: var(--mild); }
.up { color: var(--good); }
.down { color: var(--bad); }
.heat { text-align: right; background: rgba(var(--heat), var(--share)); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 6px 20px; margin: 16px 0 0;
  font-size: 13.5px; }
dt { font-weight: 550; }
dd { margin: 0; color: var(--soft); }
@media (max-width: 640px) {
  main { padding: 28px 18px 48px; }
  h1 { font-size: 25px; overflow-wrap: anywhere; }
  h2 { margin-top: 44px; }
  .figures { gap: 14px 30px; }
  .figures b { font-size: 22px; }
  #pareto { height: 500px; margin-inline: -8px; }
  th, td { padding: 7px 9px; }
  dl { grid-template-columns: 1fr; gap: 2px; }
  dd { margin-bottom: 8px; }
}
@media print { .scroll { overflow: visible; } main { max-width: none; padding: 0; } }
"""

SCRIPT = """
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
"""
