// Conversations, kept in this browser and nowhere else: one entry each in localStorage, and an index of them.
//
// Owns what is kept under `chats` and `chat.…`. A conversation is a plain object that is never changed, only replaced:
// {id, title, updated, model, settings, messages}. A message: {id, role, content} and, for an answer, reasoning,
// model, figures, error, stopped. Tabs see each other's changes through the browser's storage events.

import { signal } from "../lib.js";
import { keep, onChange, readJson } from "../core/storage.js";
import { say } from "../core/toasts.js";

const PREFIX = "chat.";
const INDEX = "chats";
const TITLE_CHARS = 60;

/** {id, title, updated}, the latest first. */
export const index = signal(readJson(INDEX) ?? []);

const opened = new Map();

/** A short id that no other conversation or message has. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The signal of one conversation; its value is null where there is none of this id. */
export function conversation(id) {
  if (!opened.has(id)) opened.set(id, signal(readJson(PREFIX + id)));
  return opened.get(id);
}

/** A conversation that nothing was said in. It is kept once something is. */
export function create(model) {
  const made = { id: newId(), title: "", updated: Date.now(), model, settings: {}, messages: [] };
  conversation(made.id).value = made;
  return made;
}

/** Replace fields of a conversation and keep it. */
export function update(id, changes) {
  const holder = conversation(id);
  const next = { ...holder.value, ...changes, updated: Date.now() };
  next.title = titleOf(next.messages);
  holder.value = next;
  if (next.messages.length) store(next);
}

/** Forget a conversation. */
export function remove(id) {
  conversation(id).value = null;
  opened.delete(id);
  keep(PREFIX + id, null);
  setIndex(index.value.filter((entry) => entry.id !== id));
}

function store(made) {
  if (!keep(PREFIX + made.id, JSON.stringify(made))) {
    say("This browser's storage is full or off, so the conversation is not kept. Delete older ones to make room.", "error");
    return;
  }
  const entry = { id: made.id, title: made.title, updated: made.updated };
  setIndex([entry, ...index.value.filter((other) => other.id !== made.id)]);
}

function setIndex(entries) {
  index.value = entries;
  keep(INDEX, JSON.stringify(entries));
}

function titleOf(messages) {
  const first = messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const line = first.split("\n")[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS).trimEnd()}…` : line;
}

onChange((name) => {
  if (name === INDEX) index.value = readJson(INDEX) ?? [];
  else if (name.startsWith(PREFIX)) {
    const holder = opened.get(name.slice(PREFIX.length));
    if (holder) holder.value = readJson(name);
  }
});
