// From the schema of a kind's configuration to the fields of a form, and from what was typed to a configuration.
//
// The server alone decides what is right; here a text becomes the number or the list that it looks like, and
// whatever does not is sent as it was typed, so that the refusal names it.

// A field that takes so much is for paragraphs.
const LONG_CHARS = 1_000;
const NUMBER = /^[+-]?(\d[\d_]*)?\.?\d+(e[+-]?\d+)?$/i;

/**
 * The fields of a form, in the schema's order: {name, label, help, kind, isLong, source, required, fallback,
 * choices, hint: {range, fallback}}. kind: "flag", "choice", "choice-flag", "number", "list", "either" (a number
 * or a text), "text".
 */
export function fieldsOf(schema) {
  const required = new Set(schema.required ?? []);
  return Object.entries(schema.properties ?? {}).map(([name, property]) => fieldOf(name, property, required.has(name)));
}

function fieldOf(name, property, required) {
  const { anyOf, ...outer } = property;
  const kinds = (anyOf ?? [property]).filter((one) => one.type !== "null");
  const shape = kinds.length === 1 ? { ...kinds[0], ...outer } : outer;
  const fallback = shape.default ?? null;
  const choices = shape.enum?.filter((one) => one !== null);
  const field = {
    name,
    label: name.replaceAll("_", " "),
    help: shape.description ?? "",
    isLong: (shape.maxLength ?? 0) >= LONG_CHARS,
    source: shape["x-source"] ?? kinds.find((one) => one["x-source"])?.["x-source"] ?? null,
    required,
    fallback,
    choices,
  };
  return { ...field, kind: kindOf(shape, kinds), hint: hintOf(shape, fallback) };
}

function kindOf({ type, enum: choices, default: fallback }, kinds) {
  if (choices) return "choice";
  // Where nothing is a third answer, a box that is ticked or not can't give it.
  if (type === "boolean") return fallback === null ? "choice-flag" : "flag";
  if (type === "array") return "list";
  const isNumber = ({ type: one }) => one === "integer" || one === "number";
  return isNumber({ type }) || (kinds.length > 0 && kinds.every(isNumber)) ? "number" : kinds.length > 1 ? "either" : "text";
}

/** The range and what is taken where nothing is typed. */
function hintOf(shape, fallback) {
  const least = shape.minimum ?? shape.exclusiveMinimum;
  const most = shape.maximum ?? shape.exclusiveMaximum;
  const low = least === undefined ? "" : `${shape.minimum === undefined ? "above" : "from"} ${least}`;
  const high = most === undefined ? "" : `${shape.maximum === undefined ? "below" : "to"} ${most}`;
  const range = [low, high].filter(Boolean).join(" ");
  return { range, fallback: fallback === null || fallback === "" ? "" : Array.isArray(fallback) ? fallback.join(", ") : String(fallback) };
}

/** What stands in each field at first. given: a configuration that was used before. */
export function valuesOf(fields, given = {}) {
  return Object.fromEntries(fields.map((field) => [field.name, shown(field, given[field.name])]));
}

function shown(field, value) {
  if (field.kind === "flag") return value ?? field.fallback ?? false;
  if (field.kind === "choice") return String(value ?? field.fallback ?? "");
  if (value === undefined || value === null) return "";
  return Array.isArray(value) ? value.join(", ") : String(value);
}

/** The configuration of what was typed: a field that is empty, or as it would be anyway, is left out. */
export function configOf(fields, values) {
  const config = {};
  for (const field of fields) {
    const typed = values[field.name];
    if (field.kind === "flag") {
      if (typed !== (field.fallback ?? false)) config[field.name] = typed;
    } else if (typed.trim() !== "" && !(field.kind === "choice" && typed === String(field.fallback))) {
      config[field.name] = read(field, typed);
    }
  }
  return config;
}

function read(field, typed) {
  const text = typed.trim();
  if (field.kind === "choice") return field.choices.find((one) => String(one) === text) ?? text;
  if (field.kind === "choice-flag") return text === "true";
  if (field.kind === "list") return text.split(",").map((one) => one.trim()).filter(Boolean);
  if ((field.kind === "number" || field.kind === "either") && NUMBER.test(text)) {
    const number = Number(text.replaceAll("_", ""));
    // 1e999 would be sent as null, which says something else.
    if (Number.isFinite(number)) return number;
  }
  return field.kind === "text" && !field.source ? typed : text;
}

/** A refusal, "config.a: …; config.b: …", by field; `rest` is what belongs to none of them. */
export function faultsOf(message, fields) {
  const known = new Set(fields.map((field) => field.name));
  const byField = {};
  const rest = [];
  for (const part of message.split(/; (?=config[.:])/)) {
    const [, name, text] = /^config\.(\w+)[^:]*: (.*)$/s.exec(part) ?? [];
    if (known.has(name)) byField[name] = byField[name] ? `${byField[name]}; ${text}` : text;
    else rest.push(part);
  }
  return { byField, rest: rest.join("; ") };
}
