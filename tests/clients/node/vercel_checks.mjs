// What the scripts of Vercel's providers share.

import { generateImage } from "ai";
import { assert, PROMPT, checkPng, refused } from "./checks.mjs";

// Generates two images, one with `providerOptions`, and edits one of them.
export async function generateAndEdit(model, providerOptions) {
  const { images } = await generateImage({ model, prompt: PROMPT, n: 2, size: "64x64", maxRetries: 0, providerOptions });
  assert.equal(images.length, 2);
  for (const image of images) checkPng(image.uint8Array);
  const prompt = { text: PROMPT, images: [images[0].uint8Array] };
  const edited = await generateImage({ model, prompt, maxRetries: 0 });
  checkPng(edited.image.uint8Array);
}

// Checks that a model that is not there is an `AI_APICallError` with the status and the sentence of the service.
export async function unknownModel(model) {
  await refused(
    () => generateImage({ model, prompt: PROMPT, maxRetries: 0 }),
    (error) => {
      assert.equal(error.name, "AI_APICallError");
      assert.equal(error.statusCode, 404);
      assert.match(error.message, /sdxl/);
    },
  );
}
