export { plot, dot, link, pointer, ruleX, text, tickX, tip } from "@observablehq/plot";
