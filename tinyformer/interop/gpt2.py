"""GPT-2 (Radford et al. 2019): learned positional embeddings, pre-norm, biases everywhere."""

from tinyformer.interop.family import ACTIVATIONS, Family, Field, Module

GPT2 = Family(
    name="GPT-2",
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    prefix="transformer.",
    groups={
        "attention": "mha",
        "position": "learned",
        "block": "pre_norm",
        "norm": "layer_norm",
        "feed_forward": "gelu",
        "task": "causal_lm",
    },
    values={"model.bias": True},
    fields=(
        Field("vocab_size", "model.vocab_size", int),
        Field("n_positions", "model.max_seq_len", int),
        Field("n_embd", "model.d_model", int),
        Field("n_layer", "model.num_layers", int),
        Field("n_head", "model.num_heads", int),
        Field("n_inner", "model.d_ff", int, None, nullable=True),
        Field("activation_function", "feed_forward.activation", str, "gelu_new", ACTIVATIONS),
        Field("layer_norm_epsilon", "norm.eps", float, 1e-5),
        Field("scale_attn_weights", "attention.score", bool, True, {True: "scaled_dot", False: "dot"}),
        Field("tie_word_embeddings", "model.tied_readout", bool, True),
        Field("embd_pdrop", "model.embedding_dropout", float, 0.1),
        Field("resid_pdrop", "model.dropout", float, 0.1),
        Field("attn_pdrop", "attention.dropout", float, 0.1),
        Field("initializer_range", "model.init_std", float, 0.02),
    ),
    # `reorder_and_upcast_attn` computes the same scores in another order, in fp32.
    fixed={"scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False},
    modules=(
        Module("wte", ("encoder.token_embedding",)),
        Module("wpe", ("encoder.position.embedding",)),
        Module("h.{}.ln_1", ("encoder.layers.{}.attention_norm",)),
        Module(
            "h.{}.attn.c_attn",
            (
                "encoder.layers.{}.attention.q_proj",
                "encoder.layers.{}.attention.k_proj",
                "encoder.layers.{}.attention.v_proj",
            ),
            transposed=True,
        ),
        Module("h.{}.attn.c_proj", ("encoder.layers.{}.attention.o_proj",), transposed=True),
        Module("h.{}.ln_2", ("encoder.layers.{}.feed_forward_norm",)),
        Module("h.{}.mlp.c_fc", ("encoder.layers.{}.feed_forward.up_proj",), transposed=True),
        Module("h.{}.mlp.c_proj", ("encoder.layers.{}.feed_forward.down_proj",), transposed=True),
        Module("ln_f", ("encoder.final_norm",)),
        Module("lm_head", ("readout.proj",)),
    ),
    unused=(".attn.bias", ".attn.masked_bias"),  # the causal mask, which older files contain
)
