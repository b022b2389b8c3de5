// The reference of the API, made of /openapi.json by Scalar. It calls the API that serves it, also below a path prefix,
// and no service of Scalar's; the content policy refuses those too.

Scalar.createApiReference("#reference", {
  url: "openapi.json",
  servers: [{ url: new URL(".", location.href).href.replace(/\/$/, "") }],
  authentication: { preferredSecurityScheme: "ApiKey" },
  defaultHttpClient: { targetKey: "shell", clientKey: "curl" },
  withDefaultFonts: false,
  telemetry: false,
  agent: { disabled: true },
  hideClientButton: true,
  showDeveloperTools: "never",
});
