// The form of a new job: which kind, and whatever its schema asks for.

import { html, useEffect, useMemo, useRef, useState } from "../lib.js";
import { call } from "../core/api.js";
import { go, linkTo } from "../core/router.js";
import { jobs } from "../core/state.js";
import { say } from "../core/toasts.js";
import { Empty, Waiting } from "../parts/bits.js";
import { Heading } from "../parts/shell.js";
import { Field } from "./field.js";
import { kinds, kindsFault, readKinds } from "./kinds.js";
import { configOf, faultsOf, fieldsOf, valuesOf } from "./schema.js";

// Fields come in the order of their weight; so many are enough to begin with.
const SHOWN_FIELDS = 9;
// Folding away one or two costs more than it saves.
const LEAST_FOLDED = 3;

/** kind: its name, or "" while none is chosen. params: from=ID of a job to do again, and values of fields. */
export function NewJob({ kind, params }) {
  useEffect(() => {
    readKinds();
  }, []);
  const known = kinds.value;
  const chosen = known?.find((one) => one.name === kind);
  const from = params.get("from");
  const row = from ? jobs.value.get(from) : null;
  return html`<div class="page job-form-page">
    <a class="link job-back" href=${linkTo("jobs")}>All jobs</a>
    <div class="page-head"><${Heading}>${chosen ? `New job: ${chosen.name}` : "New job"}<//></div>
    ${kindsFault.value && html`<div class="job-summary" role="alert"><p>The kinds of job can't be shown: ${kindsFault.value}</p>
      <button type="button" class="button small" onClick=${readKinds}>Try again</button></div>`}
    ${known === null && !kindsFault.value && html`<section class="panel"><${Waiting} label="Reading the kinds of job" /></section>`}
    ${known && html`<${Kinds} known=${known} chosen=${kind} />`}
    ${known && kind && !chosen && html`<section class="panel"><${Empty} title="There is no kind “${kind}”" /></section>`}
    ${chosen && html`<${Form} key="${kind} ${row?.id ?? ""} ${params}" kind=${chosen} given=${givenBy(row, params)} />`}
  </div>`;
}

/** What the fields hold at first: another job's configuration, and what the address says. */
function givenBy(row, params) {
  return { ...row?.config, ...Object.fromEntries([...params].filter(([name]) => name !== "from")) };
}

function Kinds({ known, chosen }) {
  return html`<nav class="job-kinds" aria-label="Kinds of job">
    ${known.map((one) => html`<a key=${one.name} class="job-choice" href=${linkTo("jobs", `new/${one.name}`)} aria-current=${one.name === chosen ? "page" : undefined}>
      <strong>${one.name}</strong><span class="faint">${one.summary}</span></a>`)}
  </nav>`;
}

function Form({ kind, given }) {
  const fields = useMemo(() => fieldsOf(kind.schema), [kind.schema]);
  const [values, setValues] = useState(() => valuesOf(fields, given));
  const [refusal, setRefusal] = useState(null);
  const [isSending, setSending] = useState(false);
  const form = useRef(null);
  const { byField, rest } = refusal ? faultsOf(refusal.message, fields) : { byField: {}, rest: "" };
  const faulty = fields.filter((field) => byField[field.name]);
  const [shown, folded] = parted(fields);

  useEffect(() => {
    // At the first thing to put right, where there is one.
    if (refusal) (form.current.querySelector('[aria-invalid="true"]') ?? form.current.querySelector(".job-summary"))?.focus();
  }, [refusal]);

  const submit = async (event) => {
    event.preventDefault();
    setSending(true);
    try {
      const row = await call("POST", "api/jobs", { kind: kind.name, config: configOf(fields, values) });
      say(`${kind.name} is ${row.status}`);
      go("jobs", row.id);
    } catch (err) {
      setRefusal({ message: err.message });
      setSending(false);
    }
  };
  const draw = (field) => html`<${Field} key=${field.name} field=${field} value=${values[field.name]} fault=${byField[field.name]} model=${values.model}
    onChange=${(value) => setValues((before) => ({ ...before, [field.name]: value }))} />`;

  return html`<form class="panel job-form" ref=${form} onSubmit=${submit} novalidate aria-label="New job: ${kind.name}">
    ${kind.gpu && html`<p class="faint">It takes the GPU for itself: answers under way end first, new requests wait until it is done.</p>`}
    ${refusal && html`<div class="job-summary" role="alert" tabindex="-1">
      ${faulty.length > 0 && html`<p>${faulty.length === 1 ? "One setting is" : `${faulty.length} settings are`} not right:</p>
        <ul>${faulty.map((field) => html`<li key=${field.name}><strong>${field.label}</strong>: ${byField[field.name]}</li>`)}</ul>`}
      ${rest && html`<p>${rest}</p>`}</div>`}
    <div class="job-fields">${shown.map(draw)}</div>
    ${folded.length > 0 && html`<details class="job-more" open=${folded.some((field) => byField[field.name] || given[field.name] !== undefined)}>
      <summary>More settings <span class="count">${folded.length}</span></summary><div class="job-fields">${folded.map(draw)}</div></details>`}
    <div class="dialog-actions"><a class="button" href=${linkTo("jobs")}>Cancel</a>
      <button class="button primary" disabled=${isSending}>${isSending ? "Starting…" : "Start"}</button></div>
  </form>`;
}

/** [fields to show, fields to fold away] */
function parted(fields) {
  const isShown = (field, i) => field.required || i < SHOWN_FIELDS;
  const folded = fields.filter((field, i) => !isShown(field, i));
  return folded.length < LEAST_FOLDED ? [fields, []] : [fields.filter(isShown), folded];
}
