// The official Anthropic client of Node on a running server: what it says, as one JSON object.
//   node anthropic.mjs BASE_URL MODEL
import Anthropic from "@anthropic-ai/sdk";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France? Answer in one sentence." }];
const warm = [{ role: "user", content: "Is it warm in Oslo?" }];
const weather = {
  name: "weather",
  description: "Of a city",
  input_schema: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const exact = { model, temperature: 0, max_tokens: 60 };
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const said = {};

said.models = (await client.models.list()).data.map((one) => one.id);

const whole = await client.messages.create({ ...exact, messages });
said.message = { text: textOf(whole), reason: whole.stop_reason, usage: whole.usage, id: Boolean(whole._request_id) };

const stream = client.messages.stream({ ...exact, messages });
said.stream = { kinds: [] };
for await (const event of stream) {
  said.stream.kinds.push(event.type);
}
const final = await stream.finalMessage();
Object.assign(said.stream, { text: textOf(final), reason: final.stop_reason, usage: final.usage });

const stopped = await client.messages.create({ ...exact, messages, stop_sequences: [" is"] });
said.stopped = { text: textOf(stopped), reason: stopped.stop_reason, sequence: stopped.stop_sequence };

const forced = { tools: [weather], tool_choice: { type: "any", disable_parallel_tool_use: true } };
const called = await client.messages.create({ ...exact, messages: warm, ...forced });
const call = called.content[0];
const told = await client.messages.create({
  ...exact, max_tokens: 16, tools: [weather], tool_choice: { type: "none" },
  messages: [
    ...warm,
    { role: "assistant", content: called.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "-3, snow" }] },
  ],
});
const streamedCall = (await client.messages.stream({ ...exact, messages: warm, ...forced }).finalMessage()).content[0];
said.tools = {
  reason: called.stop_reason,
  name: call.name,
  city: call.input.city,
  streamed: JSON.stringify(streamedCall.input) === JSON.stringify(call.input),
  then: textOf(told),
};

const form = {
  type: "object",
  properties: { kind: { type: "string", enum: ["cat", "dog"] } },
  required: ["kind"],
  additionalProperties: false,
};
const structured = await client.messages.create({
  ...exact, messages: warm, output_config: { format: { type: "json_schema", schema: form } },
});
said.structured = JSON.parse(textOf(structured));

said.counted = (await client.messages.countTokens({ model, messages })).input_tokens;
try {
  await client.messages.create({ ...exact, messages, temperature: 9 });
} catch (error) {
  said.refused = { name: error.constructor.name, type: error.error?.error?.type, id: Boolean(error.requestID) };
}
console.log(JSON.stringify(said));
