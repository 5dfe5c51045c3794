// Chat: a conversation with one model at a time, the list of earlier ones beside it.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../lib.js";
import { models, stateOf } from "../core/state.js";
import { go, route } from "../core/router.js";
import { keep, read } from "../core/storage.js";
import { Empty } from "../parts/bits.js";
import { Dialog, confirm } from "../parts/dialog.js";
import { Icon } from "../parts/icons.js";
import { Heading } from "../parts/shell.js";
import { Composer, focusComposer } from "./composer.js";
import { conversation, create, index, newId, remove, update } from "./conversations.js";
import { Message, RunningAnswer } from "./message.js";
import { announcement, runs, startRun } from "./run.js";
import { ChatSettings } from "./settings.js";
import { Switcher } from "./switcher.js";

const LAST_MODEL = "chat_model";
// Nearer to the end than this counts as reading along.
const AT_END_PX = 48;

/** Whom to ask when nobody was chosen: the last one asked, else one that is loaded, else the first. */
function defaultModel() {
  const list = models.value ?? [];
  const last = read(LAST_MODEL);
  return list.find((m) => m.id === last)?.id ?? list.find((m) => stateOf(m.id) === "ready")?.id ?? list[0]?.id ?? "";
}

export function ChatPage() {
  const { rest: id, params } = route.value;
  const talk = id ? conversation(id).value : null;
  const asked = params.get("model") ?? "";
  const [draftModel, setDraftModel] = useState(asked);
  const [draftSettings, setDraftSettings] = useState({});
  const [listing, setListing] = useState(false);
  const [editing, setEditing] = useState(null);
  const run = id ? runs.value.get(id) : undefined;
  const model = talk?.model || draftModel || defaultModel();

  useEffect(() => {
    setEditing(null);
    if (id && talk === null) go("chat", "", true);
  }, [id]);
  useEffect(() => {
    if (asked) setDraftModel(asked);
  }, [asked]);

  const choose = (name) => {
    keep(LAST_MODEL, name);
    if (talk) update(id, { model: name });
    else setDraftModel(name);
  };
  const setSettings = (settings) => (talk ? update(id, { settings }) : setDraftSettings(settings));
  const ask = (text) => {
    const open = talk ?? create(model);
    const settings = talk ? talk.settings : draftSettings;
    update(open.id, { model, settings, messages: [...open.messages, { id: newId(), role: "user", content: text }] });
    keep(LAST_MODEL, model);
    startRun(open.id);
    if (!talk) go("chat", open.id);
  };
  /** Say something else at this place; what came after it is gone. */
  const edit = (at, text) => {
    setEditing(null);
    update(id, { messages: [...talk.messages.slice(0, at), { id: newId(), role: "user", content: text }] });
    startRun(id);
    focusComposer();
  };
  /** Ask the same again, of the model that is chosen now. */
  const retry = (at) => {
    update(id, { messages: talk.messages.slice(0, at) });
    startRun(id);
    focusComposer();
  };

  const list = html`<${ConversationList} current=${id} onGo=${() => setListing(false)} />`;
  return html`<div class="chat">
    <aside class="chat-side" aria-label="Conversations">${list}</aside>
    <div class="chat-main">
      <div class="chat-head">
        <button type="button" class="icon-button only-narrow" aria-label="Conversations" onClick=${() => setListing(true)}><${Icon} name="menu" /></button>
        <${Heading} class="chat-title">${talk?.title || "New chat"}<//>
        <${Switcher} model=${model} onChoose=${choose} />
        <${ChatSettings} settings=${talk ? talk.settings : draftSettings} onChange=${setSettings} />
      </div>
      <${Thread} key=${id} id=${id} talk=${talk} run=${run} model=${model} editing=${editing} onEdit=${setEditing} onEdited=${edit} onRetry=${retry} />
      <${Composer} key="composer-${id}" run=${run} model=${model} onAsk=${ask} />
    </div>
    <div class="visually-hidden" role="status">${announcement.value}</div>
    ${listing && html`<${Dialog} title="Conversations" class="drawer" onClose=${() => setListing(false)}>${list}<//>`}
  </div>`;
}

function Thread({ talk, run, model, editing, onEdit, onEdited, onRetry }) {
  const box = useRef(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const messages = talk?.messages ?? [];

  const toEnd = () => {
    box.current.scrollTop = box.current.scrollHeight;
  };
  // What grows below is followed, unless the reader has scrolled up to read.
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  });
  const onScroll = ({ currentTarget: { scrollHeight, scrollTop, clientHeight } }) => {
    follows.current = scrollHeight - scrollTop - clientHeight < AT_END_PX;
    setAway(!follows.current);
  };
  const onGrow = () => {
    if (follows.current) toEnd();
  };

  return html`<div class="thread-box">
    <div class="thread" ref=${box} onScroll=${onScroll} tabindex="0" role="log" aria-live="off" aria-label="Messages">
      ${messages.length === 0 && !run
        ? html`<${Nothing} model=${model} />`
        : html`<ol class="messages">
            ${messages.map((message, at) => html`<${Message} key=${message.id} message=${message} busy=${Boolean(run)} isLast=${at === messages.length - 1}
              editing=${editing === message.id} onEdit=${() => onEdit(message.id)} onCancel=${() => onEdit(null)}
              onEdited=${(text) => onEdited(at, text)} onRetry=${() => onRetry(at)} />`)}
            ${!run && messages.at(-1)?.role === "user" && html`<li class="message unanswered"><p class="faint">This was not answered.</p>
              <button type="button" class="button small" onClick=${() => onRetry(messages.length)}>Ask again</button></li>`}
            ${run && html`<${RunningAnswer} key="run" run=${run} onGrow=${onGrow} />`}
          </ol>`}
    </div>
    ${away && html`<button type="button" class="button small to-end" onClick=${toEnd}><${Icon} name="down" />To the end</button>`}
  </div>`;
}

function Nothing({ model }) {
  if (models.value !== null && models.value.length === 0) {
    return html`<${Empty} title="There is no model to talk to yet">
      <p>Pull one first; the small starter model is a 93 MB download.</p>
      <button type="button" class="button" onClick=${() => go("models")}>Go to Models</button>
    <//>`;
  }
  return html`<${Empty} title=${model ? `Ask ${model}` : "Ask"}>
    <p>Conversations stay in this browser. The first question loads the model where it is not loaded yet.</p>
  <//>`;
}

function ConversationList({ current, onGo }) {
  const forget = async (entry) => {
    const sure = await confirm({
      title: "Delete this conversation?",
      text: `“${entry.title || "Untitled"}” is kept in this browser alone. It can't be brought back.`,
      action: "Delete",
    });
    if (!sure) return;
    runs.value.get(entry.id)?.stop();
    remove(entry.id);
    if (entry.id === current) go("chat", "", true);
  };
  return html`
    <button type="button" class="button wide" onClick=${() => { go("chat"); onGo(); focusComposer(); }}><${Icon} name="plus" />New chat</button>
    <ul class="conversations">
      ${index.value.map((entry) => html`<li key=${entry.id} class=${entry.id === current ? "current" : ""}>
        <a href="#/chat/${entry.id}" aria-current=${entry.id === current ? "true" : undefined} onClick=${onGo}>${entry.title || "Untitled"}</a>
        <button type="button" class="icon-button" aria-label="Delete ${entry.title || "untitled conversation"}" onClick=${() => forget(entry)}><${Icon} name="trash" /></button>
      </li>`)}
    </ul>
    ${index.value.length === 0 && html`<p class="faint pad">Nothing was said yet.</p>`}`;
}
