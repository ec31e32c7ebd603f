"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses) over the same chat as
`/v1/chat/completions`."""
