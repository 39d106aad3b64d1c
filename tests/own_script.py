"""A training script as a fork of Megatron-LM has it: Megatron's calls, and a flag of its own."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_tsp.training import gpt


def add_own_flags(parser):
    parser.add_argument("--own-flag", choices=("provider", "config", "nothing"))
    return parser


if __name__ == "__main__":
    args = parse_and_validate_args(add_own_flags, args_defaults={"tokenizer_type": "NullTokenizer"})
    if args.own_flag == "config":
        gpt_config_from_args(args, model_config_cls=type("Own", (), {}))
    if args.own_flag != "nothing":
        model = None if args.own_flag == "provider" else gpt_config_from_args(args)
        config = pretrain_cfg_container_from_args(args, model)
        pretrain(config, gpt.datasets, ModelType.encoder_or_decoder, gpt.forward_step)
