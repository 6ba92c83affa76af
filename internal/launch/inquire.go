package launch

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"time"
)

// onceMore is how soon after SIGQUIT another one is passed on to the ranks.
const onceMore = 5 * time.Second

// Inquiry is how the launcher learns what the ranks are at, which it does not know by itself: a process that hangs is alive. The
// functions are called in goroutines of their own, one at a time each; what they return is printed on Options.Stderr.
type Inquiry struct {
	// Survey asks the ranks. why is what has caused it, known what the launcher knows of each rank's process, in a clause. ctx
	// ends when there is nobody left to ask; then it returns soon.
	Survey func(ctx context.Context, why string, known []string) string
	// Alarms are causes for a survey: SIGQUIT is one, too, unless it comes again within 5 s. One that comes while a survey is made is left out.
	Alarms <-chan string
	// Epilogue follows the report of a failure, when all ranks are gone. It must not take long. known is as for Survey, and
	// culprits are the ranks that the survivors' verdict names, if there is one.
	Epilogue func(known []string, culprits []int) string
}

// heedQuit reports whether SIGQUIT has led to a survey, or is to be left alone; else it is for the ranks.
func (j *job) heedQuit() bool {
	if j.o.Inquiry == nil || !j.quitAt.IsZero() && time.Since(j.quitAt) < onceMore {
		return false
	}
	j.quitAt = time.Now()
	j.survey("SIGQUIT")
	return true
}

// survey begins one.
func (j *job) survey(why string) {
	if j.surveying {
		j.tell("%s: the ranks are being asked already", why)
		return
	}
	j.surveying = true
	ctx, known := j.surveys, j.known()
	// conclude waits for the writers before it closes the console.
	j.writers.Go(func() {
		text := j.o.Inquiry.Survey(ctx, why, known)
		if text != "" {
			j.console.put(chunk{err: true, text: []byte(text)})
		}
		j.surveyed <- struct{}{} // has room for the only one
	})
}

// alarms returns where the causes for surveys come from.
func (j *job) alarms() <-chan string {
	if j.o.Inquiry == nil {
		return nil
	}
	return j.o.Inquiry.Alarms
}

// known returns what is known of each rank's process.
func (j *job) known() []string {
	known := make([]string, len(j.ranks))
	for r, k := range j.ranks {
		where := ""
		if j.several {
			where = " on host " + k.exit.Host
		}
		switch e := &k.exit; {
		case k.ended:
			known[r] = fmt.Sprintf("%s, at %s", e.describe(), e.At.Format(clock))
		case e.PID == 0:
			known[r] = "its command has not been started yet" + where
		case !k.conn.local:
			known[r] = fmt.Sprintf("process %d%s has not ended", e.PID, where)
		default:
			known[r] = fmt.Sprintf("process %d%s %s", e.PID, where, activity(e.PID))
		}
	}
	return known
}

// activity says what the kernel has a process of this host do, in a clause.
func activity(pid int) string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The state stands behind the name, which may have any character (proc_pid_stat(5)).
	at := bytes.LastIndexByte(stat, ')')
	if err != nil || at < 0 || at+2 >= len(stat) {
		return "has just ended"
	}
	switch stat[at+2] {
	case 'T':
		return "is stopped by a signal"
	case 't':
		return "is stopped by a debugger"
	case 'D':
		return "waits in the kernel, for a disk or a network file system"
	case 'Z', 'X':
		return "has just ended"
	case 'R':
		return "computes"
	}
	return "sleeps"
}
