"""What a model writes, told apart: answer, reasoning and tool calls."""
