package elastic_test

import (
	"context"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/elastic"
	"github.com/gohvd/gohvd/hvd"
)

// A commit after a step is an error, because the state at the step is the commit. A check is not.
func TestCommitAfterStep(t *testing.T) {
	m := &model{}
	err := elastic.Run(t.Context(), m, func(ctx context.Context, job *elastic.Job) error {
		if err := job.Commit(ctx); err != nil {
			t.Errorf("before the first step: got error %v", err)
		}
		if err := job.Step(ctx, func() { m.Step++ }); err != nil {
			return err
		}
		if err := job.Check(ctx); err != nil {
			t.Errorf("check after a step: got error %v", err)
		}
		return job.Commit(ctx)
	})
	if err == nil || !strings.Contains(err.Error(), "Commit after Step") || m.Step != 1 {
		t.Errorf("got error %v after %d steps, want one because of Commit after 1 step", err, m.Step)
	}
	if err := hvd.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
}
