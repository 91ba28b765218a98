"""Chat templates in the manner of published models, on a byte tokenizer, and what they write."""

from tiny import byte_tokenizer
from tokenizers import AddedToken

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""
LLAMA3 = """{{ bos_token }}{% for message in messages %}{{ '<|start_header|>' + message['role'] + '<|end_header|>

' + message['content'] | trim + '<|eot|>' }}{% endfor %}{{ '<|start_header|>assistant<|end_header|>

' }}"""
GEMMA = """{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem role') }}{% endif %}
{%- for message in messages %}{% set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '
' + message.content | trim + '<end_of_turn>
' }}{% endfor %}{{ '<start_of_turn>model
' }}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}
{{- ' ' + message.content.strip() + ' ' + eos_token }}{% else %}
{{- '[INST] ' + message.content + ' [/INST]' }}{% endif %}{% endfor %}"""
LAST_SYSTEM = """{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}
{{- message.content + eos_token }}{% elif message.role == 'user' %}[INST] {% if loop.last and
messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- message.content + ' [/INST]' }}{% endif %}{% endfor %}"""
THINKING = CHATML.replace("+ message['content'] +", "+ message['content'].split('</think>')[-1].lstrip('\n') +")
UPPER = CHATML.replace("message['content']", "message['content'].upper()")
DROPPED = "{% for m in messages %}{% if m.role != 'assistant' %}{{ '<|im_start|>' + m.content }}{% endif %}{% endfor %}"
TWICE = CHATML.replace("message['content']", "message['content'] + message['content']")
TEMPLATES = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "llama3": (LLAMA3, ("<|start_header|>", "<|end_header|>", "<|eot|>")),
    "gemma": (GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "mistral": (MISTRAL, ("[INST]", "[/INST]")),
    "last system": (LAST_SYSTEM, ("[INST]", "[/INST]")),
    "thinking": (THINKING, ("<|im_start|>", "<|im_end|>")),
}
SYSTEM = ("chatml", "llama3", "last system", "thinking")  # templates that know a system message
ROLES = {name: ("system",) * (name in SYSTEM) + ("user", "assistant", "user") for name in TEMPLATES}
END_OF_TURN = {"chatml": "<|im_end|>", "llama3": "<|eot|>", "gemma": "<end_of_turn>", "mistral": "</s>"}
NOT_SPECIAL = ("<think>", "</think>", "<tool>", "k>{", "aXa", "#", "\n\n", "▁▁")  # the last three are vocabulary


def tokenizer_of(template, special=TEMPLATES["chatml"][1]):
    """The byte tokenizer with a template and more added tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    tokenizer.chat_template = template
    return tokenizer


def said(*contents, roles=None):
    """A conversation, which the user begins unless roles are given."""
    roles = roles or ("user", "assistant") * len(contents)
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


def rendered(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)


def unprotected(tokenizer, messages):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def controls(tokenizer, ids):
    """The added tokens among the ids, without the ones that are vocabulary."""
    added = {index: token for token, index in tokenizer.get_added_vocab().items()}
    return [added[index] for index in ids if index in added and added[index].strip("\n▁#")]
