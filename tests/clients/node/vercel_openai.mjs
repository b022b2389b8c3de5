// Vercel's AI SDK with its provider for OpenAI.

import { createOpenAI } from "@ai-sdk/openai";
import { BASE, KEY, MODEL, call, main } from "./checks.mjs";
import { generateAndEdit, unknownModel } from "./vercel_checks.mjs";

const provider = createOpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY });

call("generateImage: `n`, size, an edit", () => generateAndEdit(provider.image(MODEL), { openai: { quality: "low" } }));
call("errors: APICallError", () => unknownModel(provider.image("sdxl")));

await main();
