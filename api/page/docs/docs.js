// The reference of the API, made of /openapi.json by Swagger UI. It calls the API that serves it, also below a path
// prefix, and no other service; the content policy refuses those too.

const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", follow);
follow();

const servers = [{ url: new URL(".", location.href).href.replace(/\/$/, "") }];

/** Without servers, requests would go to the root of the origin, not below the prefix. */
const ownServer = {
  statePlugins: { spec: { wrapActions: { updateJsonSpec: (update) => (spec) => update({ ...spec, servers }) } } },
};

/** Return what `ref`, "#/components/...", names in `description`. */
function target(description, ref) {
  const names = ref.slice(2).split("/").map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
  return names.reduce((at, name) => at[name], description);
}

/** Return a copy of `node` with its references replaced, except for those inside of what they name. */
function dereferenced(node, description, within = []) {
  if (Array.isArray(node)) return node.map((each) => dereferenced(each, description, within));
  if (node === null || typeof node !== "object") return node;
  const { $ref: ref, ...rest } = node;
  const entries = Object.entries(rest).map(([name, value]) => [name, dereferenced(value, description, within)]);
  const own = Object.fromEntries(entries);
  if (ref === undefined) return own;
  if (within.includes(ref)) return node;
  return { ...dereferenced(target(description, ref), description, [...within, ref]), ...own, $$ref: ref };
}

/**
 * Swagger UI's own function converts the whole description for each part of it: with it the page is drawn after 26 s
 * and an operation opens in 10, without it after 2.4 and 1.5 (on two cores with a load of 8).
 */
const quickReferences = {
  fn: {
    resolveSubtree: async (description, path) => {
      const part = path.reduce((at, name) => at?.[name], description);
      return { spec: dereferenced(part, description), errors: [] };
    },
  },
};

SwaggerUIBundle({
  dom_id: "#reference",
  url: "openapi.json",
  plugins: [ownServer, quickReferences],
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  requestSnippetsEnabled: true,
  requestSnippets: { languages: ["curl_bash"] },
  persistAuthorization: false,
  validatorUrl: null,
});
