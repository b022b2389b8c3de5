"""OpenAI requests as jobs, and jobs as OpenAI responses; used by the API and the chores."""
