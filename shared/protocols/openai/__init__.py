"""OpenAI's bodies as our jobs, and our jobs as its answers: what the API and the chores both need."""
