// Vercel's AI SDK with its provider for servers with OpenAI's protocol.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { BASE, KEY, MODEL, call, main } from "./checks.mjs";
import { generateAndEdit, unknownModel } from "./vercel_checks.mjs";

const provider = createOpenAICompatible({ name: "fusequeue", baseURL: `${BASE}/v1`, apiKey: KEY });
const options = { fusequeue: { steps: 4, seed: 7 } };

call("generateImage: `n`, size, fields of the service, an edit", () => generateAndEdit(provider.imageModel(MODEL), options));
call("errors: APICallError", () => unknownModel(provider.imageModel("sdxl")));

await main();
