// Package doctor checks the machine on which ranks are to run, and reports what may prevent a job from
// running there.
//
// Invariants:
//
//  1. A check changes nothing on the machine, and accesses the machine only through a System.
//  2. Run returns within its time limit, even if system calls or commands hang.
//  3. A line is a fact (ok), a hint (warn), or a reason why a job will fail (fail). A line that is not ok
//     has a fix.
package doctor

import "fmt"

// Status is the severity of a Line.
type Status string

// The severities. If any Line has the status Fail, hvdrun doctor ends with exit status 1.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Line is a finding. The keys of its JSON form do not change between versions.
type Line struct {
	// Section is the heading under which the line is printed. Name says what was checked.
	Section string `json:"section"`
	Name    string `json:"name"`
	Status  Status `json:"status"`
	// Text describes the finding. It is printable and of bounded length.
	Text string `json:"text"`
	// Fix says what the user can do about the finding. It is empty if there is nothing to do.
	Fix string `json:"fix"`
}

func ok(name, format string, args ...any) Line {
	return Line{Name: name, Status: OK, Text: fmt.Sprintf(format, args...)}
}

func warn(name, fix, format string, args ...any) Line {
	return Line{Name: name, Status: Warn, Text: fmt.Sprintf(format, args...), Fix: fix}
}

func fail(name, fix, format string, args ...any) Line {
	return Line{Name: name, Status: Fail, Text: fmt.Sprintf(format, args...), Fix: fix}
}
