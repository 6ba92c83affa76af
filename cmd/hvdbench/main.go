// Hvdbench measures collective operations.
//
//	hvdrun -np 4 hvdbench allreduce -b 8 -e 128M -f 2
//
// See hvdbench --help.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// Exit statuses.
const (
	statusFailure = 1 // also if results are wrong
	statusUsage   = 2
	statusSignal  = 128 // plus the number of the signal
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// usageError is an error in the user's command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// interruptError is the cause of a context that was cancelled by a signal.
type interruptError struct{ signal unix.Signal }

func (e *interruptError) Error() string { return e.signal.String() }

// interruptible returns a context that the first SIGINT or SIGTERM cancels. A second signal kills the
// process. The returned function ends the handling of signals.
func interruptible(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	done := make(chan struct{})
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	finished := make(chan struct{})
	go func() {
		defer close(finished)
		select {
		case s := <-signals:
			signal.Stop(signals)
			cancel(&interruptError{s.(unix.Signal)})
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		<-finished
		cancel(nil)
	}
}

// run runs hvdbench and returns its exit status.
func run(args []string, stdout, stderr io.Writer) int {
	cmd := newCommand(func(ctx context.Context, o options) error {
		return measure(ctx, o, jobPlace{}, streams{stdout, stderr},
			func(ctx context.Context) (distance, error) { return measureCores(ctx, coresLimit) })
	})
	cmd.SetArgs(args)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	ctx, stop := interruptible(context.Background())
	defer stop()
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	// After a signal, an error is only a consequence of the signal.
	var interrupt *interruptError
	if errors.As(context.Cause(ctx), &interrupt) {
		fmt.Fprintf(stderr, "hvdbench: ended by signal: %v\n", interrupt)
		return statusSignal + int(interrupt.signal)
	}
	fmt.Fprintf(stderr, "hvdbench: %v\n", err)
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintln(stderr, "Try 'hvdbench --help'.")
		return statusUsage
	}
	return statusFailure
}
