// Metadata as text: `key=value, key=value`. A backslash keeps a comma or a backslash of a value.

/** The metadata of a text, with the fault of its first pair that has no `=` or the key of another one. */
export function readMetadata(text) {
  const metadata = Object.create(null);
  let fault = null;
  for (const part of text.match(/(?:\\[\\,]|[^,])+/g) ?? []) {
    const pair = part.replaceAll(/\\([\\,])/g, "$1").trim();
    const [name, ...value] = pair.split("=");
    const key = name.trim();
    if (key in metadata) fault ??= `metadata: ${key} is there twice`;
    else if (key && value.length) metadata[key] = value.join("=").trim();
    else if (pair) fault ??= `metadata: ${pair} is not key=value; write \\, for a comma in a value`;
  }
  return { metadata, fault };
}

/** The text of metadata, as it is read. */
export const metadataText = (metadata) =>
  Object.entries(metadata)
    .map((pair) => pair.join("=").replaceAll(/[\\,]/g, "\\$&"))
    .join(", ");
