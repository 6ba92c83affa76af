package main

import (
	"context"
	"slices"
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// TestRanOfOneAction checks that the ways of an action are only those of its own operations, even if other
// actions run after it has been prepared. The steps have tensors with the same name.
func TestRanOfOneAction(t *testing.T) {
	const small, large = "tcp recursive-doubling", "tcp ring"
	settings := map[string]string{"HOROVOD_CPU_OPERATIONS": "tcp"}
	err := cluster(t, 2, settings, func(ctx context.Context, at jobPlace, _ int) error {
		j, err := join(ctx, at, false, false)
		if err != nil {
			return err
		}
		operation := func(name string, numElems int64) *action {
			a, err := j.team.prepare(opSpec{kind: message.Allreduce, dt: tensor.Float32, op: tensor.Sum,
				count: numElems, inPlace: true}, name, make([]byte, 4*numElems))
			if err != nil {
				t.Error(err)
			}
			return a
		}
		step := func(mode stepMode, dt tensor.DType, numBytes int64) *action {
			a, err := j.team.step(mode, dt, []named{{"w", make([]byte, numBytes)}}, nil)
			if err != nil {
				t.Error(err)
			}
			return a
		}
		actions := []struct {
			what string
			*action
			want string
		}{
			{"operation on 4 kB", operation("small", 1000), small},
			{"operation on 400 kB", operation("large", 100000), large},
			{"asynchronous step", step(asynchronous, tensor.Float32, 4000), small},
			{"step of one tensor after another", step(perTensor, tensor.Float32, 400000), large},
			{"step of a group", step(grouped, tensor.Float32, 4000), small},
			{"step of a group of another type", step(grouped, tensor.Float64, 400000), large},
		}
		for _, a := range actions {
			if err := a.run(ctx); err != nil {
				return err
			}
		}
		for _, a := range actions {
			if ran, err := a.ran(); err != nil || !slices.Equal(ran, ways{a.want}) {
				t.Errorf("%s: ran %v, error %v; want %v", a.what, ran, err, a.want)
			}
		}
		return j.leave(ctx)
	})
	if err != nil {
		t.Error(err)
	}
}
