package exec

import (
	"context"
	"errors"
	"fmt"

	"github.com/gohvd/gohvd/ops"
)

// run executes work until End is called. Config.Finished is called once for each piece of work: with nil when
// the results of the tensors have been reported, or with an error as soon as the work has failed. The tensors
// of failed work end with the error that was passed to End, because the verdict may name a different rank
// than the peer whose connection broke.
func (l *Lane) run(ctx context.Context) {
	for {
		w, err := l.next()
		if w == nil {
			return
		}
		// Even after End, finish work that was started, because peers may still read this rank's memory. If
		// the work cannot be finished, the peers must be notified before the caller gets its memory back.
		if (err == nil || w.started) && !w.failed {
			var launched bool
			if launched, err = l.machine.execute(ctx, w); launched {
				l.launched()
				continue
			}
			if err == nil {
				l.executed()
				l.machine.finish(w, nil)
				l.cfg.Finished(w, nil)
				continue
			}
			l.cfg.Finished(w, err)
			w.failed, w.cause = true, err
		}
		if w.failed {
			err = withInUse(l.verdict(), w.cause)
			l.machine.releaseCopies(w) // not earlier, because peers may have read the copies until now
		}
		l.machine.finish(w, err)
	}
}

// withInUse returns the verdict. If err says that a device may still use the buffers, the result says so too.
func withInUse(verdict, err error) error {
	if inUse, ok := errors.AsType[*ops.InUseError](err); ok {
		return fmt.Errorf("%w; %w", verdict, inUse)
	}
	return verdict
}
