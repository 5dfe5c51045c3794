// The official OpenAI client of Node on a running server: what it says, as one JSON object.
//   node openai.mjs BASE_URL MODEL
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const question = "What is the capital of France? Answer in one sentence.";
const messages = [{ role: "user", content: question }];
const warm = [{ role: "user", content: "Is it warm in Oslo?" }];
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Oslo", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const weather = { type: "function", function: { name: "weather", description: "Of a city", parameters } };
const animal = z.object({ kind: z.enum(["cat", "dog"]), legs: z.literal(4) });
const exact = { model, temperature: 0, max_tokens: 60 };
const said = {};

said.models = (await client.models.list()).data.map((one) => one.id);

const chat = await client.chat.completions.create({ ...exact, messages });
said.chat = { text: chat.choices[0].message.content, reason: chat.choices[0].finish_reason, usage: chat.usage };

const chatStream = await client.chat.completions.create({
  ...exact, messages, stream: true, stream_options: { include_usage: true },
});
said.chatStream = { text: "", reason: null, usage: null };
for await (const chunk of chatStream) {
  const choice = chunk.choices[0];
  said.chatStream.text += choice?.delta?.content ?? "";
  said.chatStream.reason = choice?.finish_reason ?? said.chatStream.reason;
  said.chatStream.usage = chunk.usage ?? said.chatStream.usage;
}

const forced = { tools: [weather], tool_choice: "required", parallel_tool_calls: false };
const called = await client.chat.completions.create({ ...exact, messages: warm, ...forced });
const call = called.choices[0].message.tool_calls[0];
const told = await client.chat.completions.create({
  ...exact, max_tokens: 16, tools: [weather], tool_choice: "none",
  messages: [...warm, called.choices[0].message, { role: "tool", tool_call_id: call.id, content: "-3, snow" }],
});
const runner = client.chat.completions.stream({ ...exact, messages: warm, ...forced });
const streamedCall = (await runner.finalMessage()).tool_calls[0];
said.tools = {
  reason: called.choices[0].finish_reason,
  name: call.function.name,
  city: JSON.parse(call.function.arguments).city,
  streamed: streamedCall.function.arguments === call.function.arguments,
  then: told.choices[0].message.content,
};

const format = zodResponseFormat(animal, "animal");
const parsed = await client.chat.completions.parse({ ...exact, messages: warm, response_format: format });
said.parsed = parsed.choices[0].message.parsed;

const completion = await client.completions.create({ ...exact, prompt: "One, two, three,", max_tokens: 5 });
said.completion = { text: completion.choices[0].text, reason: completion.choices[0].finish_reason };
said.completionStream = { text: "", reason: null };
const completionStream = await client.completions.create({
  ...exact, prompt: "One, two, three,", max_tokens: 5, stream: true,
});
for await (const chunk of completionStream) {
  said.completionStream.text += chunk.choices[0]?.text ?? "";
  said.completionStream.reason = chunk.choices[0]?.finish_reason ?? said.completionStream.reason;
}

const asked = { model, temperature: 0, max_output_tokens: 60 };
const response = await client.responses.create({ ...asked, input: question });
said.response = { text: response.output_text, status: response.status, usage: response.usage };
const kept = await client.responses.retrieve(response.id);
said.retrieved = kept.output_text;
said.inputItems = (await client.responses.inputItems.list(response.id)).data.map((item) => item.type);

const stream = client.responses.stream({ ...asked, input: question });
said.responseStream = { kinds: [], numbers: [] };
for await (const event of stream) {
  said.responseStream.kinds.push(event.type);
  said.responseStream.numbers.push(event.sequence_number);
}
said.responseStream.text = (await stream.finalResponse()).output_text;

const functionTool = { type: "function", ...weather.function, strict: true };
const responseCall = await client.responses.create({
  ...asked, input: warm, tools: [functionTool], tool_choice: "required", parallel_tool_calls: false,
});
const item = responseCall.output[0];
const followed = await client.responses.create({
  ...asked, max_output_tokens: 16, previous_response_id: responseCall.id, tools: [functionTool], tool_choice: "none",
  input: [{ type: "function_call_output", call_id: item.call_id, output: "-3, snow" }],
});
said.responseTools = { type: item.type, name: item.name, city: JSON.parse(item.arguments).city, then: followed.output_text };

const parsedResponse = await client.responses.parse({
  ...asked, input: "Name a pet.", text: { format: zodTextFormat(animal, "animal") },
});
said.parsedResponse = parsedResponse.output_parsed;

await client.responses.delete(response.id);
try {
  await client.responses.retrieve(response.id);
} catch (error) {
  said.deleted = { name: error.constructor.name, status: error.status, code: error.code };
}
try {
  await client.chat.completions.create({ ...exact, messages, temperature: 9 });
} catch (error) {
  said.refused = { name: error.constructor.name, param: error.param, id: Boolean(error.requestID) };
}
console.log(JSON.stringify(said));
