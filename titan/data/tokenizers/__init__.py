"""The kinds of tokenizer that titan reads. `titan.data.tokenizer` picks one by a file's content."""
