"use strict";
// Draws the page from the data beside it. Texts become text nodes, never markup: they may come from anywhere.
const { model, task, hasten, command, isGenerative, report, rows } = JSON.parse(document.getElementById("data").textContent);
const { bench, candidates, chosen, machine } = report;
const USABLE = ["chosen", "eligible", "baseline"];
// What differs by less differs only in the order of additions.
const LOSSLESS = 1e-6;

// Elements

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) if (value != null) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== ""));
  return element;
}

function table(caption, columns, lines) {
  const shown = columns.filter((column) => lines.some((line) => column.cell(line) != null && column.cell(line) !== ""));
  const head = h("tr", {}, shown.map((column) => h("th", { scope: "col", class: column.kind }, column.title)));
  const body = lines.map((line) =>
    h("tr", { class: line.className }, shown.map((column) => h("td", { class: column.kind }, column.cell(line) ?? ""))));
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h("table", {}, h("caption", {}, caption), h("thead", {}, head), h("tbody", {}, body)));
}

function section(title, text, ...children) {
  return h("section", {}, h("h2", {}, title), text ? h("p", {}, text) : null, ...children);
}

function chart(label, options) {
  const width = Math.min(900, Math.max(340, document.documentElement.clientWidth - 48));
  const style = { background: "transparent", color: "currentColor", fontSize: "12px" };
  const plot = Plot.plot({ width, style, ariaLabel: label, ...options });
  plot.setAttribute("role", "img");
  return h("figure", {}, plot, h("figcaption", {}, label));
}

// Numbers

const percent = (value) => `${(100 * value).toFixed(1)} %`;
const megabytes = (bytes) => (bytes == null ? null : `${Math.round(bytes / 1e6)} MB`);
const times = (value) => `${value.toFixed(2)}×`;
const milliseconds = (value) =>
  value == null ? null : `${value < 999.5 ? Number(value.toPrecision(3)) : Math.round(value).toLocaleString("en")} ms`;
// A long name may be broken before each of its modifiers.
const variantName = (name) => name.split(/(?=\+)/).flatMap((part, index) => (index ? [h("wbr"), part] : [part]));
const shapeName = (shape) => `${shape.batch}×${shape.sequence}`;
// Values that are not finite are null.
const agreementText = (value) => value?.toFixed(5) ?? "not finite";

const shapes = [...new Set(bench.timings.map((timing) => shapeName(timing.shape)))];
const optimal = shapes[0];
const timingOf = new Map(bench.timings.filter((t) => shapeName(t.shape) === optimal).map((t) => [t.variant, t]));
const footprintOf = new Map(bench.footprints.map((footprint) => [footprint.variant, footprint]));
const chosenTiming = timingOf.get(chosen);
const chosenCandidate = candidates.find((candidate) => candidate.variant === chosen);
const verdicts = candidates.filter((candidate) => candidate.verdict);
// Variants of a ranking model are judged by the lowest of several measures.
const measures = new Set(verdicts.map((candidate) => candidate.verdict.agreement.measure));
const measure = measures.size === 1 ? [...measures][0] : "agreement";

function interval(timing) {
  if (timing.variant === bench.baseline) return "";
  if (timing.round_medians_ms.length < 6) return "too few rounds";
  const { low, high } = timing.speedup;
  return low <= 1 && high >= 1 ? "not significant" : `${low.toFixed(2)}–${high.toFixed(2)}`;
}

// Sections

function header() {
  const tile = (title, value, detail) => h("div", {}, h("dt", {}, title), h("dd", {}, value, detail ? h("small", {}, detail) : null));
  const { agreement, metric, reference_metric: reference } = chosenCandidate.verdict;
  const footprint = footprintOf.get(chosen), baseline = footprintOf.get(bench.baseline);
  const than = (name) => (baseline ? `${bench.baseline}: ${megabytes(baseline[name])}` : null);
  return h("header", {},
    h("h1", {}, model.id.replace(/\/$/, "").split("/").slice(-2).join("/")),
    h("p", {}, `${task} · ${model.architecture} · built ${report.created.slice(0, 10)} with hasten ${hasten}`),
    h("dl", { class: "tiles" },
      tile("speed", times(chosenTiming.speedup.value), `${chosen} against ${bench.baseline} at ${optimal}`),
      tile("latency", milliseconds(chosenTiming.p50_ms), isGenerative ? `p50 of a decode step at ${optimal}` : `p50 of a batch of ${optimal} tokens`),
      tile(agreement.measure, agreementText(agreement.value), `on ${agreement.rows} ${isGenerative ? "tokens" : "rows"}`),
      metric ? tile(metric.name, metric.value.toFixed(4), `reference: ${reference.value.toFixed(4)}`) : null,
      footprint ? tile("memory", megabytes(footprint.peak_memory_bytes), than("peak_memory_bytes")) : null,
      footprint ? tile("size", megabytes(footprint.size_bytes), than("size_bytes")) : null));
}

function paretoSection() {
  const points = verdicts.filter((candidate) => timingOf.has(candidate.variant)).map((candidate) => ({
    variant: candidate.variant, speed: timingOf.get(candidate.variant).speedup,
    loss: Math.max(LOSSLESS, 1 - candidate.verdict.agreement.value), isChosen: candidate.variant === chosen,
  })).sort((a, b) => a.speed.value - b.speed.value);
  points.forEach((point, index) => { point.dy = index % 2 ? 15 : -11; });
  const named = points.filter((point) => point.isChosen || report.pareto_front.includes(point.variant) || points.length < 5);
  if (!points.length) return null;
  const colour = (point) => (point.isChosen ? "var(--accent)" : "var(--other)");
  const plot = chart(`Speed at ${optimal} against ${bench.baseline}, and the loss of ${measure}. Better is up and right.`, {
    height: 300, marginLeft: 60, marginRight: 90, insetTop: 20, insetBottom: 12, grid: true,
    x: { label: `speed against ${bench.baseline} (×)`, zero: true },
    y: { label: `1 − ${measure}`, type: "log", reverse: true, ticks: 5, domain: [LOSSLESS, Math.max(1e-3, 2 * Math.max(...points.map((d) => d.loss)))],
      tickFormat: (loss) => (loss <= LOSSLESS ? "none" : loss.toExponential(0)) },
    marks: [
      Plot.ruleX([1], { stroke: "var(--line)" }),
      Plot.link(points, { x1: (d) => d.speed.low, x2: (d) => d.speed.high, y1: "loss", y2: "loss", stroke: colour, strokeWidth: 2, strokeOpacity: 0.5 }),
      Plot.dot(points, { x: (d) => d.speed.value, y: "loss", r: 5.5, fill: colour, stroke: "var(--paper)" }),
      [-11, 15].map((dy) => Plot.text(named.filter((d) => d.dy === dy), { x: (d) => d.speed.value, y: "loss", text: "variant", dy, fill: "currentColor" })),
      Plot.tip(points, Plot.pointer({ x: (d) => d.speed.value, y: "loss", fill: "var(--paper)",
        title: (d) => `${d.variant}\n${times(d.speed.value)} (${d.speed.low.toFixed(2)}–${d.speed.high.toFixed(2)})\n${measure} ${agreementText(1 - d.loss)}` })),
    ],
  });
  return section("Speed and agreement", "Every variant that passed the accuracy gate. A lossless one lies at the top.", plot);
}

function latencySection() {
  const rounds = bench.timings.flatMap((timing) => timing.round_medians_ms.map((value) => ({ ...timing, shape: shapeName(timing.shape), value })));
  const medians = bench.timings.map((timing) => ({ ...timing, shape: shapeName(timing.shape) }));
  const colour = (point) => (point.variant === chosen ? "var(--accent)" : "var(--other)");
  const plot = chart("Latency by shape (batch × tokens). Dots: p50; ticks: the median of each round.", {
    marginLeft: Math.min(260, 20 + 6.5 * Math.max(...medians.map((d) => d.variant.length))), marginRight: 60, height: 60 + 26 * medians.length,
    x: { type: "log", label: "ms", grid: true, tickFormat: "~g" }, y: { label: null, axis: "left", tickFormat: (name) => (name.length > 36 ? `${name.slice(0, 35)}…` : name) }, fy: { label: null, domain: shapes },
    marks: [
      Plot.tickX(rounds, { fy: "shape", y: "variant", x: "value", stroke: colour, strokeOpacity: 0.45 }),
      Plot.dot(medians, { fy: "shape", y: "variant", x: "p50_ms", r: 4, fill: colour, stroke: "var(--paper)" }),
      Plot.tip(medians, Plot.pointer({ fy: "shape", y: "variant", x: "p50_ms", fill: "var(--paper)",
        title: (d) => `${d.variant}, ${d.shape}\np50 ${milliseconds(d.p50_ms)}, p90 ${milliseconds(d.p90_ms)}\n${times(d.speedup.value)}` })),
    ],
  });
  const lines = bench.timings.map((timing) => ({ ...timing, className: timing.variant === chosen ? "chosen" : null }));
  const columns = [
    { title: "shape", cell: (t) => shapeName(t.shape) + (t.timed_shape ? `, from ${shapeName(t.timed_shape)}` : "") },
    { title: "variant", kind: "name", cell: (t) => variantName(t.variant) },
    { title: "p50", kind: "number", cell: (t) => milliseconds(t.p50_ms) },
    { title: "p90", kind: "number", cell: (t) => milliseconds(t.p90_ms) },
    { title: "p99", kind: "number", cell: (t) => milliseconds(t.p99_ms) },
    { title: isGenerative ? "tokens/s" : "rows/s", kind: "number", cell: (t) => Number(t.rows_per_s.toPrecision(3)).toLocaleString("en") },
    { title: "speed", kind: "number", cell: (t) => times(t.speedup.value) },
    { title: "95 % interval", kind: "number", cell: interval },
  ];
  const busy = bench.other_cpu_share > 0.1 ? h("p", { class: "note" }, `Other processes used ${percent(bench.other_cpu_share)} of the CPUs meanwhile.`) : null;
  return section("Latency", `Alternating rounds, one process per variant; speed is against ${bench.baseline}.`, busy, plot, table("All timings", columns, lines));
}

function accuracySection() {
  const lines = verdicts.map((candidate) => ({ ...candidate, ...candidate.verdict, className: candidate.variant === chosen ? "chosen" : null }));
  const columns = [
    { title: "variant", kind: "name", cell: (line) => variantName(line.variant) },
    { title: "gate", cell: (line) => h("span", { class: `status ${line.status}` }, line.passed ? "passed" : "rejected") },
    { title: "agreement", kind: "number", cell: (line) => agreementText(line.agreement.value) },
    { title: "measure", cell: (line) => line.agreement.measure },
    { title: "lowest cosine", kind: "number", cell: (line) => line.agreement.cosine_min?.toFixed(5) },
    { title: "largest error", kind: "number", cell: (line) => line.agreement.max_error?.toExponential(1) ?? "not finite" },
    { title: "flips", kind: "number", cell: (line) => line.agreement.flips },
    { title: "metric", kind: "number", cell: (line) => line.metric && `${line.metric.value.toFixed(4)}` },
    { title: "rows", kind: "number", cell: (line) => line.agreement.rows },
    { title: "verdict", kind: "text", cell: (line) => line.reason },
  ];
  const worst = verdicts.filter((candidate) => candidate.verdict.passed && (candidate.verdict.agreement.max_error ?? Infinity) > 1e-3)
    .map((candidate) => ({ candidate, index: candidate.verdict.agreement.worst.find((index) => rows[index]) }))
    .filter(({ index }) => index != null);
  return section("Accuracy", "Each variant is compared with the original model before it is timed; a variant that fails the gate is not eligible.",
    table("Verdicts", columns, lines),
    worst.map(({ candidate, index }) => [
      h("p", {}, `${candidate.variant} differs most on row ${index}:`),
      Object.values(rows[index]).map((text) => h("blockquote", {}, text)),
    ]));
}

function rejectedSection() {
  const rejected = candidates.filter((candidate) => !USABLE.includes(candidate.status));
  if (!rejected.length) return null;
  return section("Not used", "Variants that were considered, and why they are not in the bundle.",
    table("Variants and reasons", [
      { title: "variant", kind: "name", cell: (line) => variantName(line.variant) },
      { title: "status", cell: (line) => h("span", { class: `status ${line.status}` }, line.status) },
      { title: "reason", kind: "text", cell: (line) => line.reason },
    ], rejected));
}

function passesSection() {
  const total = (operators) => Object.values(operators).reduce((sum, count) => sum + count, 0);
  const changes = (pass) => [...new Set([...Object.keys(pass.operators_before), ...Object.keys(pass.operators_after)])]
    .map((name) => [name, (pass.operators_after[name] ?? 0) - (pass.operators_before[name] ?? 0)])
    .filter(([, change]) => change).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1])).slice(0, 5)
    .map(([name, change]) => `${name} ${change > 0 ? "+" : "−"}${Math.abs(change)}`).join(", ");
  const lines = report.passes.filter((pass) => total(pass.operators_before));
  if (!lines.length) return null;
  return section("Graph passes", "What each pass did to the operators of the graph.",
    table("Passes", [
      { title: "pass", kind: "name", cell: (pass) => pass.name },
      { title: "operators", kind: "number", cell: (pass) => `${total(pass.operators_before)} → ${total(pass.operators_after)}` },
      { title: "largest changes", kind: "text", cell: changes },
      { title: "for", cell: (pass) => pass.variants.join(", ") },
      { title: "left unfused", cell: (pass) => pass.unfused.map((entry) => `${entry.pattern}: ${entry.reason}`).join("; ") },
    ], lines));
}

function stagesSection() {
  const lines = report.stages;
  const seconds = lines.reduce((sum, stage) => sum + stage.seconds, 0);
  return section("Build", `${Math.round(seconds)} s in all.`,
    table("Stages", [
      { title: "stage", kind: "name", cell: (stage) => stage.name },
      { title: "seconds", kind: "number", cell: (stage) => stage.seconds.toFixed(1) },
      { title: "peak memory", kind: "number", cell: (stage) => megabytes(stage.peak_memory_bytes) },
      { title: "notes", kind: "text", cell: (stage) => stage.notes.join("; ") },
    ], lines),
    h("h3", {}, "Reproduce"), h("pre", { tabindex: 0 }, command ?? "built from a Python object: there is no command"),
    h("p", {}, [machine.cpu, `${machine.cores} cores`, megabytes(machine.memory_bytes), machine.system, ...machine.gpus.map((gpu) => gpu.name)].join(" · ")),
    h("p", {}, [`Python ${machine.python}`, ...Object.entries(machine.libraries).map(([name, version]) => `${name} ${version}`)].join(" · ")));
}

function footprintSection() {
  return section("Memory and size", "Measured in a process of its own for each variant.",
    table("Footprints", [
      { title: "variant", kind: "name", cell: (line) => variantName(line.variant) },
      { title: "on the Pareto front", cell: (line) => (report.pareto_front.includes(line.variant) ? "yes" : "") },
      { title: "load", kind: "number", cell: (line) => milliseconds(line.load_ms) },
      { title: "peak memory", kind: "number", cell: (line) => megabytes(line.peak_memory_bytes) },
      { title: "GPU memory", kind: "number", cell: (line) => megabytes(line.gpu_memory_bytes) },
      { title: "size", kind: "number", cell: (line) => megabytes(line.size_bytes) },
    ], bench.footprints));
}

const caveats = [...report.notes, ...verdicts.filter((candidate) => candidate.verdict.passed)
  .flatMap((candidate) => candidate.verdict.notes.map((note) => `${candidate.variant}: ${note}`))];
const page = document.getElementById("page");
try {
  page.replaceChildren(...[
    header(), ...caveats.map((note) => h("p", { class: "note" }, note)), paretoSection(), latencySection(), accuracySection(),
    footprintSection(), rejectedSection(), passesSection(), stagesSection(),
    h("footer", {}, "Charts: Observable Plot (ISC licence). This page needs no network."),
  ].filter(Boolean));
} catch (error) {
  page.replaceChildren(h("p", { class: "note" }, `This report cannot be drawn (${error}). Its numbers are in report.json beside it.`));
  throw error;
}
