package analysis

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// maxRankLines is the maximum number of ranks in a report, which has one line for each rank. Further ranks
// are left out.
const maxRankLines = 64

// HasEntries reports whether some rank waits for an operation or executes one, or whether there is a stall.
func (f *Findings) HasEntries() bool { return len(f.Waiting)+len(f.Running)+len(f.Stalls) > 0 }

// Blame records which ranks ended the job. If an operation may wait for one of them, Blame removes all other
// ranks from the ranks that it may wait for, because they may have been about to ask for it.
func (f *Findings) Blame(culprits []int) {
	guilty := func(r int) bool { return slices.Contains(culprits, r) }
	for i := range f.Waiting {
		w := &f.Waiting[i]
		if slices.ContainsFunc(w.Silent, guilty) || slices.ContainsFunc(w.Unknown, guilty) ||
			slices.ContainsFunc(w.Missing, func(m Missing) bool { return guilty(m.Rank) }) {
			w.Missing = slices.DeleteFunc(w.Missing, func(m Missing) bool { return !guilty(m.Rank) })
			w.Silent = slices.DeleteFunc(w.Silent, func(r int) bool { return !guilty(r) })
			w.Unknown = slices.DeleteFunc(w.Unknown, func(r int) bool { return !guilty(r) })
		}
	}
}

// Text returns the report as text for people: first the problems, then the state of each rank. The text has
// at most a few hundred lines, and no control characters.
func (f *Findings) Text() string {
	var b strings.Builder
	list(&b, len(f.Waiting), shown, "tensors that ranks wait for", func(i int) {
		f.writeWaiting(&b, &f.Waiting[i])
	})
	list(&b, len(f.Running), shown, "operations in progress", func(i int) {
		fmt.Fprintln(&b, f.Running[i].Text())
	})
	if len(f.Ranks) > 0 && len(f.Waiting)+len(f.Running) == 0 {
		b.WriteString("No rank that answered waits for an operation.\n")
	}
	silent := f.SilentText()
	list(&b, len(silent), 2*shown, "reasons why ranks did not answer", func(i int) {
		fmt.Fprintln(&b, silent[i])
	})
	if len(f.Stalls) > 0 {
		b.WriteString("Stalls that the coordinator reports:\n")
		list(&b, len(f.Stalls), shown, "stalls", func(i int) {
			fmt.Fprintf(&b, "  %s\n", logs.Plain(f.Stalls[i]))
		})
	}
	if len(f.Ranks) > 0 {
		b.WriteString("State of each rank:\n")
		list(&b, len(f.Ranks), maxRankLines, "ranks", func(i int) {
			r := &f.Ranks[i]
			fmt.Fprintf(&b, "  rank %d (host %s, pid %d): %s\n", r.Rank, logs.Plain(r.Host), r.PID, r.Describe())
		})
	}
	return b.String()
}

// list writes the first of n items, up to the maximum number most, and then the number of items that are
// left.
func list(b *strings.Builder, n, most int, what string, write func(i int)) {
	for i := range min(n, most) {
		write(i)
	}
	if n > most {
		fmt.Fprintf(b, "  ... and %d more %s\n", n-most, what)
	}
}

// Text returns a sentence that says which ranks have waited for which tensors, and which ranks have not
// called them.
func (w *Waiting) Text() string {
	what := label(w.Kind, w.Names, w.NumNames, w.Set)
	called := label(counterpart(w.Kind), w.Names, w.NumNames, w.Set)
	join := w.Kind == message.Join
	long := span(w.Longest)
	missing := w.missing()
	unknown := "" // the other ranks that this may wait for, as text
	if len(w.Unknown) > 0 {
		unknown = fmt.Sprintf("; %s may not have called it, because not all pending operations are known",
			topo.FormatRanks(w.Unknown))
	}
	if silent := topo.FormatRanks(w.Silent); len(w.Silent) > 0 && len(missing) > 0 {
		unknown = "; " + silent + " did not answer and may be missing too" + unknown
	} else if len(w.Silent) > 0 {
		unknown = ", perhaps because it was not called by " + silent + ", which did not answer" + unknown
	}
	switch {
	case len(missing) > 0 && join:
		return fmt.Sprintf("%s %s joined%s, but %s not; the join has waited for %s%s.",
			capital(topo.FormatRanks(w.Ranks)), have(w.Ranks), ofSet(w.Set), topo.FormatRanks(missing)+" "+
				have(missing), long, unknown)
	case len(missing) > 0:
		return fmt.Sprintf("%s %s not called %s, for which %s %s waited for %s%s.",
			capital(topo.FormatRanks(missing)), have(missing), called, topo.FormatRanks(w.Ranks),
			have(w.Ranks), long, unknown)
	case unknown != "":
		return fmt.Sprintf("%s %s waited for %s for %s%s.", capital(topo.FormatRanks(w.Ranks)), have(w.Ranks),
			what, long, unknown)
	}
	return fmt.Sprintf("%s %s called %s, which has not been granted for %s: the grant is in progress, or other tensors of its group are missing.",
		capital(topo.FormatRanks(w.Ranks)), have(w.Ranks), what, long)
}

// missing returns the numbers of the ranks in w.Missing.
func (w *Waiting) missing() (ranks []int) {
	for _, m := range w.Missing {
		ranks = append(ranks, m.Rank)
	}
	return ranks
}

func (f *Findings) writeWaiting(b *strings.Builder, w *Waiting) {
	fmt.Fprintln(b, w.Text())
	join := w.Kind == message.Join
	list(b, len(w.Missing), shown, "ranks", func(i int) {
		m := &w.Missing[i]
		at := slices.IndexFunc(f.Ranks, func(r Rank) bool { return r.Rank == m.Rank })
		var times string
		switch first := fmt.Sprintf("%q", w.Names[0]); {
		case join && m.Times == 0:
			times = "has not joined"
		case strings.HasPrefix(w.Names[0], anyRank) || at >= 0 && f.Ranks[at].Off:
			times = "has not called it"
		case m.Times == 0 && !m.Complete:
			times = "has not called it since the oldest entry of its flight recorder"
		case m.Times == 0:
			times = "never called it in this epoch"
		default:
			if w.NumNames == 1 {
				first = "it"
			}
			times = fmt.Sprintf("called %s %s before; the last call ended %s ago", first, count(m.Times),
				span(m.Ago))
		}
		where := ""
		if at >= 0 {
			where = "; " + f.Ranks[at].Describe()
		}
		fmt.Fprintf(b, "  rank %d %s%s\n", m.Rank, times, where)
	})
}

// anyRank begins the names of messages that may come from any rank.
const anyRank = "any rank to "

// counterpart returns the kind of operation that the other ranks must call if a rank waits for the given
// kind.
func counterpart(kind message.Kind) message.Kind {
	switch kind {
	case message.Send:
		return message.Recv
	case message.Recv:
		return message.Send
	}
	return kind
}

// Text returns a sentence that says which ranks are executing the operation.
func (r *Running) Text() string {
	what := label(r.Kind, r.Names, r.NumNames, r.Set)
	if r.Backend != message.NoBackend {
		what += " (" + r.Backend.String() + ")"
	}
	var parts []string
	add := func(list []int, text string) {
		if len(list) > 0 {
			parts = append(parts, fmt.Sprintf(text, topo.FormatRanks(list)))
		}
	}
	if len(r.Inside) > 0 {
		parts = append(parts, fmt.Sprintf("%s %s executing %s, submitted %s ago", topo.FormatRanks(r.Inside),
			are(r.Inside), what, span(r.Longest)))
	} else {
		parts = append(parts, fmt.Sprintf("no rank is executing %s, submitted %s ago", what, span(r.Longest)))
	}
	add(r.Queued, "%s: not started")
	add(r.Waiting, "%s: not granted yet")
	add(r.Ended, "%s: completed")
	return capital(strings.Join(parts, "; ")) + "."
}

// SilentText returns a sentence for each reason why ranks did not answer. The sentence lists these ranks.
func (f *Findings) SilentText() (sentences []string) {
	var whys []string
	of := make(map[string][]int)
	for _, s := range f.Silent {
		if of[s.Why] == nil {
			whys = append(whys, s.Why)
		}
		of[s.Why] = append(of[s.Why], s.Rank)
	}
	for _, why := range whys {
		text := ""
		if why != "" {
			text = ": " + logs.Plain(why)
		}
		sentences = append(sentences, fmt.Sprintf("%s did not answer%s.", capital(topo.FormatRanks(of[why])), text))
	}
	return sentences
}

// Describe returns a clause that says what the rank is doing.
func (r *Rank) Describe() string {
	text := "no operation is pending"
	if r.First != nil {
		state := "has waited for"
		switch {
		case r.First.Begun > 0:
			state = "has executed"
		case r.First.Granted > 0:
			state = "has waited to execute"
		}
		text = fmt.Sprintf("it %s %s for %s", state, label(r.First.Kind, []string{r.First.Name}, 1,
			r.First.Set), span(r.Waited))
		switch more := r.Pending - 1; {
		case more == 1:
			text += " and for 1 more operation"
		case more > 1:
			text += fmt.Sprintf(" and for %d more operations", more)
		}
	}
	switch {
	case r.Off:
		return text
	case r.Last == nil:
		return text + "; no operation has ended"
	}
	text += fmt.Sprintf("; its last operation was %s, which ended %s ago",
		label(r.Last.Kind, []string{r.Last.Name}, 1, r.Last.Set), span(r.Ago))
	if r.Last.Error != "" {
		text += ", with an error: " + logs.Plain(r.Last.Error)
	}
	return text
}

// label returns a phrase for n tensors of a kind. It lists the names in the slice some.
func label(kind message.Kind, some []string, n int, set topo.ProcessSetID) string {
	var b strings.Builder
	b.WriteString(kind.String())
	for i, name := range some {
		sep := " "
		if i > 0 {
			sep = ", "
		}
		fmt.Fprintf(&b, "%s%q", sep, name)
	}
	if more := n - len(some); more > 0 {
		fmt.Fprintf(&b, " ... and %d more", more)
	}
	return b.String() + ofSet(set)
}

func ofSet(set topo.ProcessSetID) string {
	if set == 0 {
		return ""
	}
	return " of process set " + strconv.FormatUint(uint64(set), 10)
}

func have(list []int) string {
	if len(list) == 1 {
		return "has"
	}
	return "have"
}

func are(list []int) string {
	if len(list) == 1 {
		return "is"
	}
	return "are"
}

func count(times int) string {
	if times == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", times)
}

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// span formats a duration for people, with a unit that suits its length.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < 10*time.Minute:
		return strconv.FormatFloat(d.Seconds(), 'f', 1, 64) + " s"
	}
	return d.Round(time.Second).String()
}
