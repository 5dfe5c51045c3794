// A protocol's official client of Node on a running server: each event that its stream yields, as a line
// {"model", "event"}, and the same answer asked for whole, as a line {"model", "whole"}.
//   node exact.mjs BASE_URL MODEL[,MODEL...] chat|messages|responses < the request, without model, as JSON
import Anthropic from "@anthropic-ai/sdk";
import { readFileSync } from "node:fs";
import OpenAI from "openai";

const [url, models, kind] = process.argv.slice(2);
const asked = JSON.parse(readFileSync(0, "utf8"));
const exact = { apiKey: "none", maxRetries: 0 };
const endpoints = {
  chat: () => new OpenAI({ ...exact, baseURL: `${url}/v1` }).chat.completions,
  messages: () => new Anthropic({ ...exact, baseURL: url }).messages,
  responses: () => new OpenAI({ ...exact, baseURL: `${url}/v1` }).responses,
};
const endpoint = endpoints[kind]();
const say = (line) => console.log(JSON.stringify(line));

for (const model of models.split(",")) {
  for await (const event of await endpoint.create({ ...asked, model, stream: true })) {
    say({ model, event });
  }
  say({ model, whole: await endpoint.create({ ...asked, model }) });
}
