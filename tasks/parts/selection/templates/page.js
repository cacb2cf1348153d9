(() => {
  const data = JSON.parse(document.getElementById("report-data").textContent);
  const named = (fields, values) => Object.fromEntries(fields.map((field, place) => [field, values[place]]));
  const measured = data.engines.map((values) => named(data.engine_fields, values)).filter((engine) => engine.p50);
  const targets = [...new Set(measured.map((engine) => engine.target))];
  const byId = (id) => document.getElementById(id);
  const nameOf = (engine) => `${engine.variant}-${engine.target}`;
  const ofTarget = (target) => measured.filter((engine) => engine.target === target);
  const find = (target, variant) => ofTarget(target).find((engine) => engine.variant === variant);
  const by = (...keys) => (one, other) =>
    keys.map((key) => key(one) - key(other)).find((order) => order) ?? 0;
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Text and numbers.
  const minus = (text) => text.replace("-", "−");
  const shownMs = (ms) => (ms < 1 ? ms.toFixed(3) : ms < 10 ? ms.toFixed(2) : ms.toFixed(1));
  const signed = (value, digits) => minus((value > 0 ? "+" : "") + value.toFixed(digits));
  const shownChange = (ms) => signed(ms, 3);
  const shownShare = (share, digits = 1) => minus((100 * share).toFixed(digits)) + " %";
  const shownGain = (share) => (share > 0 ? "+" : "") + shownShare(share);
  const bytes = (count) =>
    count === null || count === undefined ? "–"
      : count < 1024 ? `${count} B` : count < 1048576 ? `${Math.round(count / 1024)} KiB`
      : `${Math.round(count / 1048576)} MiB`;
  const short = (text, length = 44) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

  // Elements. Text is never read as markup.
  const element = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const drawn = (tag, attributes = {}, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const label = (x, y, text, attributes = {}) => drawn("text", { x, y, ...attributes }, text);
  const picture = (width, height, title, ...children) =>
    drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, ...children);
  const table = (caption, heads, rows) => {
    const cell = (tag, content, column) => {
      const node = element(tag, column > 0 && heads[column].number ? { class: "num" } : {});
      node.append(...[content].flat());
      return node;
    };
    const line = (tag, cells) => element("tr", {}, ...cells.map((content, column) => cell(tag, content, column)));
    return element("div", { class: "scroll" }, element("table", {},
      element("caption", {}, caption),
      element("thead", {}, line("th", heads.map((head) => head.text))),
      element("tbody", {}, ...rows.map((cells) => line("td", cells)))));
  };
  const text = (name) => ({ text: name });
  const number = (name) => ({ text: name, number: true });

  // Scales of the plots: from a value to a place.
  const scaled = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);
  const logScaled = (low, high, from, to) => {
    const scale = scaled(Math.log(low), Math.log(high), from, to);
    return (value) => scale(Math.log(value));
  };
  const logTicks = (low, high) => {
    const found = [], steps = high / low < 200 ? [1, 2, 5] : [1];
    for (let decade = Math.floor(Math.log10(low)); decade <= Math.ceil(Math.log10(high)); decade++)
      for (const step of steps) {
        const value = step * 10 ** decade;
        if (value >= low && value <= high) found.push(Number(value.toPrecision(3)));
      }
    return found;
  };
  const axes = (box, x, y, xTicks, yTicks, xTitle, yTitle) => drawn("g", { class: "axes" },
    ...xTicks.map((tick) => drawn("path", { d: `M${x(tick.value)} ${box.top}V${box.bottom}` })),
    ...yTicks.map((tick) => drawn("path", { d: `M${box.left} ${y(tick.value)}H${box.right}` })),
    ...xTicks.map((tick) => label(x(tick.value), box.bottom + 16, tick.text, { "text-anchor": "middle" })),
    ...yTicks.map((tick) => label(box.left - 6, y(tick.value) + 4, tick.text, { "text-anchor": "end" })),
    label((box.left + box.right) / 2, box.bottom + 36, xTitle, { "text-anchor": "middle" }),
    label(box.left, box.top - 8, yTitle));

  // State, kept in the address so that a view can be shared.
  const start = measured.find((engine) => engine.picked) ?? measured[0];
  const state = { target: start?.target, ms: Infinity, loss: data.max_loss, a: "", b: "", delta: 0 };
  const readState = () => {
    const given = new URLSearchParams(location.hash.slice(1));
    if (targets.includes(given.get("target"))) state.target = given.get("target");
    for (const key of ["ms", "loss", "delta"])
      if (given.has(key) && Number(given.get(key)) >= 0) state[key] = Number(given.get(key));
    for (const key of ["a", "b"]) if (given.has(key)) state[key] = given.get(key);
    keepPair();
  };
  const writeState = () => {
    const kept = new URLSearchParams({ target: state.target, a: state.a, b: state.b });
    if (state.ms !== Infinity) kept.set("ms", state.ms);
    if (state.loss !== data.max_loss) kept.set("loss", state.loss);
    if (state.delta) kept.set("delta", state.delta);
    history.replaceState(null, "", `#${kept}`);
  };
  const keepPair = () => {
    const engines = ofTarget(state.target);
    const best = chosen() ?? engines.find((engine) => engine.picked) ?? engines[0];
    if (!find(state.target, state.b)) state.b = best.variant;
    if (!find(state.target, state.a) || state.a === state.b) {
      const before = (data.details[state.target]?.pairs ?? []).filter((pair) => pair.after === state.b);
      const others = engines.filter((engine) => engine.variant !== state.b);
      const slowest = others.sort(by((engine) => -engine.p50))[0];
      state.a = find(state.target, before[0]?.before) ? before[0].before : slowest?.variant ?? state.b;
    }
  };

  // Which engine: the pipeline's own pick if it is within the limits, else the fastest that is.
  const holds = (engine) => {
    const parentLimit = data.max_loss ? (state.loss / data.max_loss) * data.max_parent_loss : state.loss;
    return engine.may_ship && engine.p50_high <= state.ms && engine.loss_high <= state.loss
      && (engine.frame_loss_high ?? -Infinity) <= state.loss && engine.parent_loss_high <= parentLimit;
  };
  const chosen = () => {
    const engines = ofTarget(state.target);
    const own = engines.find((engine) => engine.picked);
    if (own && state.loss === data.max_loss && own.p50_high <= state.ms) return own;
    const fitting = engines.filter(holds).sort(by((engine) => engine.p50));
    const asFast = fitting.filter((engine) => engine.p50_low <= fitting[0].p50_high);
    return asFast.sort(by((engine) => -engine.score, (engine) => engine.p50))[0];
  };
  const step = (from, to, what) => {
    const ms = to.p50 - from.p50;
    return element("p", {}, element("b", {}, `Next ${what}: `), `${to.variant}, ${shownMs(to.p50)} ms (`
      + `${shownChange(ms)} ms, ${shownGain(ms / from.p50)}), ${data.metric} ${to.score.toFixed(4)} `
      + `(${signed(to.score - from.score, 4)}), loses up to ${shownShare(to.loss_high)}; `
      + `verdict: ${to.verdict.toLowerCase().replaceAll("_", " ")}.`);
  };
  const showChoice = () => {
    const engine = chosen(), engines = ofTarget(state.target), answer = byId("choice");
    byId("ms-shown").textContent = state.ms === Infinity ? "no limit" : `at most ${shownMs(state.ms)} ms`;
    byId("loss-shown").textContent = `at most ${shownShare(state.loss, 2)}`;
    if (!engine) {
      const nearest = engines.filter((other) => other.may_ship).sort(by((other) => other.loss_high))[0];
      answer.replaceChildren(element("p", {}, "No engine is within these limits. ",
        nearest ? `The most accurate one, ${nearest.variant}, takes ${shownMs(nearest.p50)} ms and loses up to `
          + `${shownShare(nearest.loss_high)}.` : ""));
      return;
    }
    const shippable = engines.filter((other) => other.may_ship && other.front);
    const faster = shippable.filter((other) => other.p50_high < engine.p50_low).sort(by((other) => -other.p50))[0];
    const better = shippable.filter((other) => other.score > engine.score).sort(by((other) => other.p50))[0];
    const limits = [`--target ${state.target}`];
    if (state.ms !== Infinity) limits.push(`--max-latency-ms ${state.ms.toPrecision(4)}`);
    const command = engine.picked
      ? `python -m flows.pick ${limits.join(" ")} --download ${state.target}`
      : `mkdir ${state.target} && cp artifacts/build_engine/${engine.variant}/${engine.target}/engine/*.* ${state.target}`;
    answer.replaceChildren(
      element("p", { class: "chosen" }, element("strong", {}, engine.variant),
        ` ${shownMs(engine.p50)} ms (${shownMs(engine.p50_low)} to ${shownMs(engine.p50_high)}), ${data.metric} `
        + `${engine.score.toFixed(4)}, loses ${shownShare(engine.loss)} (up to ${shownShare(engine.loss_high)})`
        + (engine.picked ? "; the pipeline's pick" : "")),
      ...(faster ? [step(engine, faster, "faster")] : [element("p", {}, "None of the front is faster.")]),
      ...(better ? [step(engine, better, "more accurate")] : [element("p", {}, "None is more accurate.")]),
      element("p", {}, element("code", {}, command)));
  };

  // The front, with intervals.
  const drawFront = () => {
    const box = { left: 64, right: 884, top: 30, bottom: 372 }, holder = byId("front");
    if (!measured.length) return holder.replaceChildren("No engine was measured.");
    const base = measured.find((engine) => nameOf(engine) === data.reference)?.score ?? 1;
    const gate = base * (1 - data.max_loss);
    const lows = measured.map((engine) => engine.p50_low), highs = measured.map((engine) => engine.p50_high);
    const scores = [...measured.map((engine) => engine.score), gate];
    const x = logScaled(Math.min(...lows) * 0.9, Math.max(...highs) * 1.1, box.left, box.right);
    const span = Math.max(...scores) - Math.min(...scores) || 0.01;
    const [low, high] = [Math.min(...scores) - 0.08 * span, Math.max(...scores) + 0.08 * span];
    const y = scaled(low, high, box.bottom, box.top);
    const within = (score) => y(Math.min(high, Math.max(low, score)));
    const ticksOf = (values, show) => values.map((value) => ({ value, text: show(value) }));
    const parts = [axes(box, x, y, ticksOf(logTicks(Math.min(...lows) * 0.9, Math.max(...highs) * 1.1), String),
      ticksOf([0, 1, 2, 3, 4].map((place) => low + (place / 4) * (high - low)), (value) => value.toFixed(3)),
      "latency p50, batch 1 (ms, log scale)", data.metric)];
    parts.push(drawn("path", { class: "gate", d: `M${box.left} ${y(gate)}H${box.right}` }),
      label(box.right, y(gate) - 5, `gate ${gate.toFixed(3)}`, { "text-anchor": "end" }));
    for (const target of targets) {
      const colour = data.colours[target], focus = target === state.target;
      const front = ofTarget(target).filter((engine) => engine.front).sort(by((engine) => engine.p50));
      if (front.length > 1)
        parts.push(drawn("path", { class: "line", stroke: colour, opacity: focus ? 0.8 : 0.25,
          d: front.map((engine, place) => place ? `H${x(engine.p50)}V${y(engine.score)}`
            : `M${x(engine.p50)} ${y(engine.score)}`).join("") }));
    }
    for (const engine of [...measured].sort(by((one) => one.target === state.target))) {
      const focus = engine.target === state.target, dominated = engine.dominated_by;
      const colour = dominated ? "var(--soft)" : data.colours[engine.target];
      const [cx, cy] = [x(engine.p50), y(engine.score)];
      const words = `${engine.variant} on ${engine.target}: ${shownMs(engine.p50)} ms, ${data.metric} `
        + `${engine.score.toFixed(4)}, ${engine.picked ? "pick" : engine.verdict.toLowerCase().replaceAll("_", " ")}`
        + (dominated ? `, dominated by ${dominated}` : "");
      const group = drawn("g", { class: "point", tabindex: focus ? 0 : -1, opacity: focus ? 1 : 0.3 },
        drawn("title", {}, words));
      if (focus)
        group.append(drawn("path", { class: "interval", stroke: colour,
          d: `M${x(engine.p50_low)} ${cy}H${x(engine.p50_high)}`
            + `M${cx} ${within(base * (1 - engine.loss_high))}V${within(base * (1 - engine.loss_low))}` }));
      group.append(drawn("circle", { cx, cy, r: engine.picked ? 8 : 5, stroke: colour,
        fill: engine.verdict === "ACCEPT" ? colour : "var(--paper)" }));
      if (focus && engine.front)
        group.append(label(cx + 9, cy - 8, engine.variant));
      const choose = () => {
        Object.assign(state, { target: engine.target, b: engine.variant });
        update();
      };
      group.addEventListener("click", choose);
      group.addEventListener("keydown", (event) => event.key === "Enter" && choose());
      parts.push(group);
    }
    holder.replaceChildren(picture(900, 420, `Latency and ${data.metric} of ${measured.length} engines`, ...parts));
  };

  // Two engines of a target.
  const details = () => data.details[state.target];
  const layersOf = (variant) => {
    const known = details(), engine = known?.engines[known.same_file[variant] ?? variant];
    if (!engine) return null;
    const texts = ["layer", "operators", "precision", "bound", "module", "source"];
    return engine.layers.map((values) => {
      const layer = named(known.layer_fields, values);
      for (const field of texts) layer[field] = known.texts[layer[field]];
      return layer;
    });
  };
  const pairOf = (a, b) => {
    const known = details();
    if (!known) return null;
    const [first, second] = [known.same_file[a], known.same_file[b]];
    const has = (before, after) => (pair) => pair.before === before && pair.after === after;
    const forth = known.pairs.find(has(first, second));
    if (forth) return { ...forth, before: a, after: b };
    const back = known.pairs.find(has(second, first));
    if (!back) return null;
    const steps = back.steps.map(([part, before, after, ms]) => [part, after, before, -ms]);
    return { ...back, before: a, after: b, steps, parts_ms: back.parts_ms.map((ms) => -ms) };
  };
  const words = (name) => name.replaceAll("_", " ");
  const drawWaterfall = (pair, before, after) => {
    const parts = details().parts.map((name, place) => [words(name), pair.parts_ms[place]]);
    const bars = [[before.variant, 0, before.p50]];
    let at = before.p50;
    for (const [name, ms] of parts) if (ms) bars.push([name, at, (at += ms)]);
    bars.push([after.variant, 0, after.p50]);
    const ends = bars.flatMap(([, from, to]) => [from, to]);
    const x = scaled(Math.min(0, ...ends), Math.max(...ends), 170, 720);
    return picture(820, 28 * bars.length + 8, `From ${before.variant} to ${after.variant} in milliseconds`,
      ...bars.map(([name, from, to], place) => {
        const isTotal = place === 0 || place === bars.length - 1, top = 28 * place + 6;
        const [left, right] = [x(Math.min(from, to)), x(Math.max(from, to))];
        return drawn("g", { class: isTotal ? "total" : to > from ? "worse" : "better" },
          label(160, top + 14, short(name, 22), { "text-anchor": "end" }),
          drawn("rect", { x: left, y: top, width: Math.max(1, right - left), height: 20, rx: 2 }),
          label(right + 6, top + 14, isTotal ? `${shownMs(to)} ms` : shownChange(to - from)));
      }));
  };
  const figures = (before, after) => {
    const rows = data.figures.map(({ key, name, digits, lower }) => {
      const [one, other] = [before[key], after[key]];
      if (one === null || one === undefined || other === null || other === undefined) {
        if (one === other || (one ?? other) === undefined) return null;
      }
      const shown = (value) => (value === null || value === undefined ? "–" : value.toFixed(digits));
      const both = typeof one === "number" && typeof other === "number" && one;
      const change = both ? (other - one) / Math.abs(one) : 0;
      const good = lower ? change < 0 : change > 0;
      const cell = element("span", { class: change ? (good ? "up" : "down") : "" }, both ? shownGain(change) : "–");
      return [name, shown(one), shown(other), cell];
    });
    return table("Measured", [text("Figure"), number(before.variant), number(after.variant), number("Change")],
      rows.filter((row) => row));
  };
  const stepRows = (pair, one, other) => {
    const joined = (layers, places) => places.map((place) => layers[place].layer).join(" + ") || "–";
    const total = (layers, places) => (places.length ? sum(places.map((place) => layers[place].milliseconds)).toFixed(3) : "–");
    const all = (layers, places, field) => [...new Set(places.map((place) => layers[place][field] || "–"))].join(" ");
    return pair.steps
      .filter((found) => Math.abs(found[3]) >= state.delta)
      .sort(by((found) => -Math.abs(found[3])))
      .map(([part, before, after, ms]) => {
        const places = after.length ? [other, after] : [one, before];
        const where = places[0][places[1][0]];
        return [
          element("span", { title: joined(...places) }, short(joined(...places)),
            element("small", {}, short(where.source || where.module || "", 60))),
          all(...places, "operators"), words(details().parts[part]),
          `${all(one, before, "precision")} → ${all(other, after, "precision")}`,
          total(one, before), total(other, after), shownChange(ms), all(...places, "bound")];
      });
  };
  const transitions = (pair, one, other) => {
    const counts = {}, froms = new Set(), tos = new Set();
    const precision = (layers, places) => (places.length ? layers[places[0]].precision || "other" : "none");
    for (const [, before, after, ms] of pair.steps) {
      const [from, to] = [precision(one, before), precision(other, after)];
      froms.add(from);
      tos.add(to);
      const cell = (counts[`${from}\n${to}`] ??= { count: 0, ms: 0 });
      cell.count += 1;
      cell.ms += ms;
    }
    const columns = [...tos].sort();
    return table(`Precision transitions, layers and ms: rows in ${pair.before}, columns in ${pair.after}`,
      [text("from \\ to"), ...columns.map(number)],
      [...froms].sort().map((from) => [from, ...columns.map((to) => {
        const cell = counts[`${from}\n${to}`];
        return cell ? [`${cell.count}`, element("small", {}, `${shownChange(cell.ms)} ms`)] : "–";
      })]));
  };
  const classLoss = (before, after) => {
    if (!data.classes.length || !before.iou?.length || !after.iou?.length) return "";
    const rows = data.classes.map((name, place) => [name, before.iou[place], after.iou[place]])
      .filter(([, one, other]) => one !== null && other !== null)
      .sort(by(([, one, other]) => other - one))
      .map(([name, one, other]) => [name, one.toFixed(3), other.toFixed(3),
        element("span", { class: other < one ? "down" : "up" }, minus((other - one).toFixed(3)))]);
    return table("IoU of each class, largest loss first",
      [text("Class"), number(before.variant), number(after.variant), number("Change")], rows);
  };

  // Images.
  const unpack = (place) => data.gallery.runs[place].split(" ").flatMap((run) => {
    const [kind, length] = run.split("x").map(Number);
    return Array(length).fill(kind);
  });
  const colourOf = (kind) => kind === data.gallery.no_class ? [128, 128, 128]
    : kind === 0 ? [28, 30, 34] : [0, 1, 2].map((part) => Math.round(
      140 + 110 * Math.cos(2 * Math.PI * (kind * 0.381966 + part / 3))));
  const mask = (values, title, paint = colourOf) => {
    const { width, height } = data.gallery;
    const canvas = element("canvas", { width, height, role: "img", "aria-label": title });
    const image = new ImageData(width, height);
    values.forEach((value, place) => image.data.set([...paint(value), 255], 4 * place));
    canvas.getContext("2d").putImageData(image, 0, 0);
    return element("figure", {}, canvas, element("figcaption", {}, title));
  };
  const showImages = (before, after) => {
    const gallery = data.gallery, holder = byId("images");
    const [one, other] = [gallery?.answers[nameOf(before)], gallery?.answers[nameOf(after)]];
    if (!one || !other)
      return holder.replaceChildren(element("p", { class: "soft" }, "No answers of these two engines are kept."));
    const isMask = gallery.width * gallery.height > 1;
    const rows = gallery.places.map((place, index) => {
      const [first, second] = [unpack(one[index]), unpack(other[index])];
      const differs = first.map((value, pixel) => Number(value !== second[pixel]));
      return { place, index, first, second, differs, share: sum(differs) / differs.length };
    }).filter((row) => row.share > 0).sort(by((row) => -row.share)).slice(0, 6);
    const intro = `Of the ${gallery.num_images} images of split ${gallery.split}, those here on which the two differ `
      + "most; the report keeps the images on which any engines differ most.";
    const name = (kind) => data.classes[kind] ?? `class ${kind}`;
    const lines = rows.map((row) => {
      const image = element("img", { src: gallery.pictures[row.index], alt: `image ${row.place}` });
      const truth = unpack(gallery.truth[row.index]);
      const share = isMask ? `: ${shownShare(row.share)} of the pixels differ` : "";
      const head = element("figure", {}, image, element("figcaption", {}, `image ${row.place}${share}`));
      return element("div", { class: "answers" }, head, ...(isMask
        ? [mask(truth, "label"), mask(row.first, before.variant), mask(row.second, after.variant),
          mask(row.differs, "differences", (value) => (value ? [224, 66, 66] : [232, 230, 225]))]
        : [element("p", {}, `label ${name(truth[0])}; ${before.variant}: ${name(row.first[0])}; `
          + `${after.variant}: ${name(row.second[0])}`)]));
    });
    holder.replaceChildren(element("p", { class: "soft" },
      rows.length ? intro : "On the kept images the two engines give the same answers."), ...lines);
  };

  // Roofs.
  const drawRoofs = (engine) => {
    const holder = byId("roofs"), known = details(), layers = layersOf(engine.variant);
    if (!layers || !Object.keys(known.roofs.macs_per_s).length)
      return holder.replaceChildren(element("p", { class: "soft" }, "No roofs were measured for this engine."));
    const dots = layers.filter((layer) => layer.macs && layer.bytes && layer.milliseconds > 0)
      .map((layer) => ({ layer, density: layer.macs / layer.bytes, rate: layer.macs / layer.milliseconds * 1e3 }));
    const box = { left: 64, right: 884, top: 30, bottom: 352 }, peaks = Object.entries(known.roofs.macs_per_s);
    if (!dots.length)
      return holder.replaceChildren(element("p", { class: "soft" }, "No layer of this engine has multiply-adds."));
    const densities = dots.map((dot) => dot.density), rates = dots.map((dot) => dot.rate);
    const [xLow, xHigh] = [Math.min(...densities) / 2, Math.max(...densities) * 4];
    const [yLow, yHigh] = [Math.min(...rates) / 2, 1.6 * Math.max(...peaks.map(([, rate]) => rate), ...rates)];
    const x = logScaled(xLow, xHigh, box.left, box.right), y = logScaled(yLow, yHigh, box.bottom, box.top);
    const top = Math.max(...peaks.map(([, rate]) => rate));
    const slopes = [known.roofs.bytes_per_s[0], known.roofs.bytes_per_s.at(-1)].map(([size, rate]) => {
      const [from, to] = [Math.max(xLow, yLow / rate), Math.min(xHigh, top / rate)];
      if (from >= to) return "";
      return drawn("g", {}, drawn("path", { class: "roof",
        d: `M${x(from)} ${y(from * rate)}L${x(to)} ${y(to * rate)}` }),
        label(x(from) + 4, y(from * rate) - 6, `${bytes(size)}: ${(rate / 1e9).toFixed(1)} GB/s`));
    });
    const ceilings = peaks.map(([name, rate]) => drawn("g", {},
      drawn("path", { class: "roof", d: `M${box.left} ${y(rate)}H${box.right}` }),
      label(box.right, y(rate) - 5, `${name}: ${(rate / 1e9).toFixed(0)} GMAC/s`, { "text-anchor": "end" })));
    const longest = Math.max(...dots.map((dot) => dot.layer.milliseconds));
    const points = dots.sort(by((dot) => -dot.layer.milliseconds)).map(({ layer, density, rate }) =>
      drawn("circle", { cx: x(density), cy: y(rate), r: 3 + 17 * Math.sqrt(layer.milliseconds / longest),
        class: `bound ${layer.bound}` }, drawn("title", {},
        `${layer.layer} (${layer.operators}, ${layer.precision}): ${layer.milliseconds.toFixed(4)} ms, `
        + `${(rate / 1e9).toFixed(1)} GMAC/s, ${density.toFixed(1)} MAC/byte, ${layer.bound}`
        + (layer.source ? `, ${layer.source}` : ""))));
    const shown = (values, scale, unit) => values.map((value) => ({ value, text: `${value / scale}${unit}` }));
    const plot = picture(900, 400, `Roofline of ${engine.variant}: ${dots.length} layers`,
      axes(box, x, y, shown(logTicks(xLow, xHigh), 1, ""), shown(logTicks(yLow, yHigh), 1e9, ""),
        "multiply-adds per byte moved (log scale)", "GMAC/s (log scale); the area of a dot is its time; blue: bound by compute, orange: by memory, "
          + "violet: by overhead"),
      ...slopes, ...ceilings, ...points);
    const found = known.engines[known.same_file[engine.variant]];
    const shares = Object.entries(found.share_by_bound).map(([name, share]) => `${name} ${shownShare(share, 0)}`);
    const causes = found.causes.map(([kind, layer, detail, ms]) => element("li", {},
      element("b", {}, words(kind.toLowerCase())), ` ${layer ? `${short(layer)}: ` : ""}${detail} (${ms.toFixed(3)} ms)`));
    const more = found.num_causes - found.causes.length;
    holder.replaceChildren(plot,
      element("p", { class: "soft" }, `${engine.variant}: ${shares.join(", ")}. At its roofs it would take `
        + `${found.attainable_ms === null ? "–" : shownMs(found.attainable_ms)} ms instead of ${shownMs(engine.p50)}.`),
      element("ul", {}, ...causes, ...(more > 0 ? [element("li", {}, `and ${more} more in explain.md`)] : [])));
  };

  const showPair = () => {
    const [before, after] = [find(state.target, state.a), find(state.target, state.b)];
    const pair = pairOf(state.a, state.b), holder = byId("pair");
    const [one, other] = [layersOf(state.a), layersOf(state.b)];
    const parts = [figures(before, after), classLoss(before, after)];
    byId("delta").disabled = !pair;
    if (pair) {
      const largest = Math.max(...pair.steps.map((found) => Math.abs(found[3])), 1e-6);
      byId("delta").max = largest;
      byId("delta").step = largest / 200;
      byId("delta").value = state.delta;
      byId("delta-shown").textContent = `${state.delta.toFixed(4)} ms or more`;
      const rows = stepRows(pair, one, other);
      parts.unshift(element("p", {}, pair.advice), drawWaterfall(pair, before, after));
      parts.push(transitions(pair, one, other), table(
        `Layers, ${rows.length} of ${pair.steps.length} shown`,
        [text("Layer"), text("Operators"), text("Part"), text("Precision"), number(`${before.variant} ms`),
          number(`${after.variant} ms`), number("Change ms"), text("Bound")], rows.slice(0, 300)));
    } else {
      byId("delta-shown").textContent = "–";
      const isSame = details()?.same_file[state.a] && details().same_file[state.a] === details().same_file[state.b];
      const reason = data.without_details.includes(state.target)
        ? `the layers of ${state.target} find no room in this file; see artifacts/explain/${state.target}`
        : isSame ? "both are the same engine file" : "the layers of these two engines are not known";
      parts.unshift(element("p", { class: "soft" }, `No waterfall: ${reason}.`));
    }
    holder.replaceChildren(...parts);
    showImages(before, after);
    drawRoofs(after);
  };

  // Controls.
  const fill = (select, values, value) => {
    select.replaceChildren(...values.map((name) => element("option", { value: name }, name)));
    select.value = value;
  };
  const SLIDER_STEPS = 200;
  const msRange = () => {
    const engines = ofTarget(state.target);
    return [Math.min(...engines.map((engine) => engine.p50_high)), Math.max(...engines.map((engine) => engine.p50_high))];
  };
  const mostLoss = () => Math.max(4 * data.max_loss, 0.01,
    ...ofTarget(state.target).map((engine) => Math.min(1, engine.loss_high)));
  const setControls = () => {
    const [low, high] = msRange();
    fill(byId("target"), targets, state.target);
    const variants = ofTarget(state.target).map((engine) => engine.variant);
    fill(byId("a"), variants, state.a);
    fill(byId("b"), variants, state.b);
    byId("ms").value = state.ms === Infinity ? SLIDER_STEPS
      : Math.round(scaled(Math.log(low), Math.log(high), 0, SLIDER_STEPS - 1)(Math.log(state.ms)));
    byId("loss").value = Math.round(SLIDER_STEPS * state.loss / mostLoss());
  };
  const update = () => {
    keepPair();
    setControls();
    showChoice();
    drawFront();
    showPair();
    writeState();
  };
  const listen = () => {
    byId("target").addEventListener("change", (event) => {
      Object.assign(state, { target: event.target.value, a: "", b: "", ms: Infinity, delta: 0 });
      update();
    });
    for (const key of ["a", "b"])
      byId(key).addEventListener("change", (event) => {
        const other = key === "a" ? "b" : "a";
        if (event.target.value === state[other]) state[other] = state[key];
        Object.assign(state, { [key]: event.target.value, delta: 0 });
        update();
      });
    byId("ms").addEventListener("input", (event) => {
      const [low, high] = msRange(), place = Number(event.target.value);
      state.ms = place >= SLIDER_STEPS ? Infinity
        : Number(Math.exp(scaled(0, SLIDER_STEPS - 1, Math.log(low), Math.log(high))(place)).toPrecision(5)) * 1.0001;
      showChoice();
      writeState();
    });
    byId("loss").addEventListener("input", (event) => {
      const given = Number(event.target.value) / SLIDER_STEPS * mostLoss();
      const near = Math.abs(given - data.max_loss) <= mostLoss() / SLIDER_STEPS / 2;
      state.loss = near ? data.max_loss : given;
      showChoice();
      writeState();
    });
    byId("delta").addEventListener("input", (event) => {
      state.delta = Number(event.target.value);
      showPair();
      writeState();
    });
    addEventListener("hashchange", () => {
      readState();
      update();
    });
  };

  // Rows of the table that are not in the page from the start, and sorting.
  const addRows = () => {
    const body = document.querySelector("table.sortable tbody");
    for (const cells of data.more_rows)
      body.append(element("tr", {}, ...cells.map(([content, small, kind, value, chip]) => {
        const node = element("td", { class: kind });
        if (value !== null) node.dataset.value = value;
        const main = chip === null ? content : element("span", { class: `chip ${chip}` }, content);
        node.append(kind === "name" && chip === null ? element("b", {}, main) : main);
        if (small) node.append(element("small", {}, small));
        return node;
      })));
  };
  byId("more")?.addEventListener("click", (event) => {
    addRows();
    event.target.parentElement.remove();
  });
  for (const sorted of document.querySelectorAll("table.sortable")) {
    const heads = [...sorted.tHead.rows[0].cells];
    heads.forEach((head, column) => head.querySelector("button")?.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const rows = [...sorted.tBodies[0].rows].sort((one, other) => {
        const [x, y] = [value(one), value(other)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      sorted.tBodies[0].append(...rows);
    }));
  }
  if (measured.length) {
    readState();
    listen();
    update();
  }
})();
