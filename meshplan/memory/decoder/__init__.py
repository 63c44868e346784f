"""Operations of one microbatch of the decoder families that are known by their config."""
