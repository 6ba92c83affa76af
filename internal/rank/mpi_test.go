//go:build mpi

package rank

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	empi "github.com/emer/empi/mpi"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/engine"
)

// TestInitAfterFailureOfMPI runs in a process for each rank (TestInitAfterFailureWithMPI). When a job in
// lock-step has failed, a collective of the negotiation may still be pending at some ranks. So Start refuses
// to use MPI again, at the rank that has failed and at the others.
func TestInitAfterFailureOfMPI(t *testing.T) {
	runtime.LockOSThread() // the thread that initializes MPI
	if err := empi.InitThreadSafe(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	o := Options{Log: zap.NewNop(), Settings: map[string]string{
		"HOROVOD_CONTROLLER": "mpi", "HOROVOD_CPU_OPERATIONS": "mpi", "HVD_NEGOTIATION": "lockstep"}}
	for range 2 { // after an orderly Shutdown, Start succeeds again
		r := new(Rank)
		if err := r.Start(ctx, o); err != nil {
			t.Fatal(err)
		}
		if err := r.Shutdown(ctx, engine.Departure{}); err != nil {
			t.Fatal(err)
		}
	}
	r := new(Rank)
	if err := r.Start(ctx, o); err != nil {
		t.Fatal(err)
	}
	why := engine.Departure{Reason: "it has given up", Failed: r.Global.Me == 1}
	if !why.Failed {
		<-r.Engine.Ended()
	}
	if err := r.Shutdown(ctx, why); err == nil || !strings.Contains(err.Error(), "it has given up") {
		t.Errorf("got error %v from Shutdown, want that of the failed rank", err)
	}
	err := new(Rank).Start(ctx, o)
	for _, want := range []string{"MPI cannot be used any more in this process", "it has given up"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v from Start after the failure, want %q", err, want)
		}
	}
	if !t.Failed() {
		fmt.Println("MPI was refused")
		// mpirun may end the others when a process has ended without finalizing MPI.
		<-ctx.Done()
	}
	os.Exit(0) // the goroutine that owns MPI does not end, because MPI cannot be finalized
}
