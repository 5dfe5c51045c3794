// Values of configurations, results and metrics as people read them.

/** A value of a configuration or of a result, for a person. */
export function inWords(value) {
  if (value === null) return "–";
  if (typeof value === "number") return figure(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A number as short as it can be told: 0.00002, 2.345, 1,048,576. */
export function figure(value) {
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return Math.abs(value) < 0.001 ? String(Number(value.toPrecision(4))) : value.toLocaleString("en-US", { maximumSignificantDigits: 5 });
}
