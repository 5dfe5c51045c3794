"""What was answered on /v1/responses, kept so that a conversation can go on from it."""
