package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/elastic"
	"github.com/gohvd/gohvd/hvd"
	roster "github.com/gohvd/gohvd/internal/elastic"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/ps"
)

const (
	// faultVariable tells the programs of TestFaultTable what happens to the victim, which victimVariable
	// names.
	faultVariable = "GOHVD_E2E_FAULT"
	// onceVariable names the variable with the path of a file that the victim makes, so that the fault does
	// not happen again after a restart. Without it, the fault happens in every process of the victim.
	onceVariable = "GOHVD_E2E_ONCE"
)

// faultStep is the step of training in which the fault happens.
const faultStep = 20

// errRaised is the error with which the victim ends if the fault is "raised".
var errRaised = fmt.Errorf("raised in step %d", faultStep)

// happen makes a fault happen to this process. It returns errRaised if the program must end as after an
// error, and nil if the process goes on.
func happen(fault string) error {
	if path := os.Getenv(onceVariable); path != "" {
		file, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return nil // it has happened to an earlier process
		}
		file.Close()
	}
	if fault != "cut" { // the test cuts the link
		fmt.Println("fault")
	}
	switch fault {
	case "killed":
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	case "stopped", "hung in Init":
		// The thread that gets the signal does not go on. After a signal to the process, this thread might
		// still vote, without a notification, and rank 0 would find the vote with its next heartbeat.
		runtime.LockOSThread()
		_ = unix.Tgkill(os.Getpid(), unix.Gettid(), unix.SIGSTOP)
		runtime.UnlockOSThread()
	case "raised":
		return errRaised
	case "exit 0":
		os.Exit(0)
	case "exit 7":
		os.Exit(7)
	}
	return nil
}

// ended prints when and how a program of TestFaultTable has ended and returns the exit status.
func ended(err error) int {
	if err == nil {
		return 0
	}
	fmt.Println("error", time.Now().UnixNano(), strings.ReplaceAll(err.Error(), "\n", " "))
	if errors.Is(err, errRaised) {
		return 3
	}
	return 1
}

// faulty is the program of a rank that runs allreduces until the fault happens to the victim.
func faulty(ctx context.Context) error {
	fault, victim := os.Getenv(faultVariable), os.Getenv("HOROVOD_RANK") == os.Getenv(victimVariable)
	reached := func(step string) {
		if fault == "hung in Init" && victim && step == os.Getenv(stepVariable) {
			_ = happen(fault)
		}
	}
	fmt.Println("pid", os.Getpid())
	fmt.Println("begins")
	reached(stepBegin)
	if err := hvd.Init(ctx, hvd.WithLogger(follows(reached))); err != nil {
		return err
	}
	for step := 0; ; step++ {
		if victim && step == faultStep && fault != "hung in Init" {
			if err := happen(fault); err != nil {
				return err
			}
		}
		if _, err := hvd.Allreduce(ctx, make([]float32, 1000), hvd.Name("gradient")); err != nil {
			return err
		}
		if step == faultStep {
			fmt.Println("ready")
		}
	}
}

// faultyElastic is a process of an elastic job on one host. It trains until the fault happens to the victim,
// and then until the file in E2E_END exists. It prints "round" when it trains in a generation in which a rank
// is missing.
func faultyElastic(ctx context.Context) error {
	member, err := roster.ParseMember(os.Getenv(launch.MemberVariable))
	if err != nil {
		return err
	}
	fault, victim := os.Getenv(faultVariable), strconv.Itoa(member.Index) == os.Getenv(victimVariable)
	reached := func(step string) {
		if fault == "hung in Init" && victim && step == os.Getenv(stepVariable) {
			_ = happen(fault)
		}
	}
	fmt.Println("pid", os.Getpid())
	fmt.Println("begins")
	reached(stepBegin)
	s := new(training)
	err = elastic.Run(ctx, s, func(ctx context.Context, job *elastic.Job) error {
		for told := false; ; {
			if victim && s.Step == faultStep && fault != "hung in Init" {
				if err := happen(fault); err != nil {
					return err
				}
			}
			end := []int64{0}
			if !proceed() {
				end[0] = 1
			}
			end, err := hvd.Allreduce(ctx, end, hvd.Op(hvd.Max), hvd.Name("end"))
			if err != nil || end[0] == 1 {
				return err
			}
			if s.Step++; s.Step == faultStep {
				fmt.Println("ready")
			}
			if hvd.Size() < 3 && !told {
				fmt.Println("round", s.Step)
				told = true
			}
			if err := job.Commit(ctx); err != nil {
				return err
			}
		}
	}, hvd.WithLogger(follows(reached)))
	if err != nil {
		return err
	}
	return hvd.Shutdown(ctx)
}

// faultyNode is a node of a parameter server whose workers set and read values until the fault happens to the
// victim. If returnVariable is set, the workers wait for the return of a node, and end when the file in
// E2E_END exists.
func faultyNode(ctx context.Context) error {
	name := os.Getenv("DMLC_ROLE")
	if name != "scheduler" {
		name += " " + os.Getenv("DMLC_RANK")
	}
	fault, victim := os.Getenv(faultVariable), name == os.Getenv(victimVariable)
	fmt.Println("pid", os.Getpid())
	fmt.Println("begins")
	if victim && fault == "hung in Init" {
		_ = happen(fault)
	}
	node, err := ps.Join(ctx, ps.Config{})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	if node.Role() == ps.Server {
		_, err = ps.NewKVServer(node, ps.Sum[float64]())
	}
	switch {
	case err != nil:
	case node.Role() == ps.Worker:
		err = faultyWorker(ctx, node, victim, fault)
	case victim && fault != "hung in Init":
		<-time.After(100 * time.Millisecond) // meanwhile the workers send requests
		err = happen(fault)
	}
	return finalize(ctx, node, err)
}

// returnVariable names the variable that makes the workers wait for the return of a node that has ended.
const returnVariable = "GOHVD_E2E_RETURN"

func faultyWorker(ctx context.Context, node *ps.Node, victim bool, fault string) error {
	w, err := ps.NewKVWorker[float64](node)
	if err != nil {
		return err
	}
	returns, key := os.Getenv(returnVariable) != "", uint64(node.Rank())
	var told time.Time
	for step := 0; !returns || proceed(); step++ {
		if victim && step == faultStep && fault != "hung in Init" {
			if err := happen(fault); err != nil {
				return err
			}
		}
		gone, err := setAndRead(ctx, w, []uint64{key, ps.MaxKey/2 + key}, float64(step))
		if err == nil && gone == 0 && !returns {
			err = node.Barrier(ctx, ps.WorkerGroup)
		}
		switch {
		case err != nil:
			return err
		case gone != 0 && !returns:
			return fmt.Errorf("%s is gone", gone)
		case gone != 0:
			if err := node.AwaitReturn(ctx, gone); err != nil {
				return err
			}
			<-time.After(5 * time.Millisecond) // the connection with the server comes after the news
		case time.Since(told) > 10*time.Millisecond:
			fmt.Println("round", step)
			told = time.Now()
		}
	}
	return nil
}
