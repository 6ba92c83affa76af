package trace

import "time"

// Step is a training step that has ended, as rank 0 sees it.
type Step struct {
	// Sequence counts the steps of the epoch, from 1. Number is the number that the program has given it.
	Sequence uint64 `json:"sequence"`
	Number   uint64 `json:"number"`
	// Begun is when it began, since the start of rank 0's engine, and Time its duration.
	Begun time.Duration `json:"begun_ns"`
	Time  time.Duration `json:"time_ns"`
	// Held[r] is for how long rank r held up all others in the step. The rules are those of analysis.Held.
	Held []time.Duration `json:"held_ns"`
}
