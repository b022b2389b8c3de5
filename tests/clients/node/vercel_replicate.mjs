// Vercel's AI SDK with its provider for Replicate.

import { createReplicate } from "@ai-sdk/replicate";
import { BASE, KEY, MODEL, call, main } from "./checks.mjs";
import { generateAndEdit, unknownModel } from "./vercel_checks.mjs";

const provider = createReplicate({ baseURL: `${BASE}/compat/replicate/v1`, apiToken: KEY });
const options = { replicate: { num_inference_steps: 4, guidance_scale: 2 } };

call("generateImage: `n`, size, steps, an edit", () => generateAndEdit(provider.image(`fusequeue/${MODEL}`), options));
call("errors: APICallError", () => unknownModel(provider.image("fusequeue/sdxl")));

await main();
