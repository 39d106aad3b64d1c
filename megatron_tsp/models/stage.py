"""One pipeline stage of a model, from its config: what the builders of both models share."""

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_tsp.models.backends import TSPSpecProvider


class StageBuilder:
    """In front of a model builder of Megatron's among the bases: builds with TSP's layers. Wrapping
    the stages for training is Megatron's.

    Attributes:
        model: the class of a stage.
    """

    model: type[LanguageModule]

    def layers(self, backend: TSPSpecProvider, vp_stage: int | None, pp_group) -> dict:
        """What only this kind of model takes: its layers and its settings, as keywords."""
        raise NotImplementedError

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> LanguageModule:
        """One pipeline stage, as the `build_model` of Megatron's builder."""
        config = self._model_config
        transformer = config.transformer
        stage = {"vp_stage": vp_stage, "vp_size": transformer.virtual_pipeline_model_parallel_size}
        if pre_process is None:
            pre_process = is_vp_first_stage(**stage) and is_pp_first_stage(pg_collection.pp)
        if post_process is None:
            post_process = is_vp_last_stage(**stage) and is_pp_last_stage(pg_collection.pp)
        vocab_size = config.vocab_size
        if config.should_pad_vocab:
            vocab_size = calculate_padded_vocab_size(
                vocab_size,
                config.make_vocab_size_divisible_by,
                transformer.tensor_model_parallel_size,
            )
        backend = TSPSpecProvider(config.tsp, transformer)
        return self.model(
            config=transformer,
            vocab_size=vocab_size,
            max_sequence_length=config.seq_length,
            fp16_lm_cross_entropy=config.fp16_lm_cross_entropy,
            parallel_output=config.parallel_output,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            seq_len_interpolation_factor=config.seq_len_interpolation_factor,
            pre_process=pre_process,
            post_process=post_process,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
            options=config.tsp,
            **self.layers(backend, vp_stage, pg_collection.pp),
        )
