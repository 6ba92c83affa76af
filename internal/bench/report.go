package bench

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// mpi are the peers that the ratios of collectives are about. Open MPI runs yielding and spinning.
var mpi = []string{"ompi", "ompi-spin", "mpich"}

// ours is how the peer column of our own rows begins.
const ours = "ours"

// caseKey is what a program is timed at.
type caseKey struct {
	op    string
	ranks int
	bytes int64
}

// comparison has the medians in microseconds, by case, peer and round.
type comparison struct {
	times  map[caseKey]map[string]map[int]float64
	rounds []int
	failed []string
	about  []string // lines on machine and versions
	ran    string   // what was run
}

// resultFile is PEER-npN-roundR.csv.
var resultFile = regexp.MustCompile(`^(.+)-np(\d+)-round(\d+)\.csv$`)

// readComparison reads a folder that scripts/bench-peers.sh has filled.
func readComparison(dir string) (*comparison, error) {
	c := &comparison{times: make(map[caseKey]map[string]map[int]float64)}
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	rounds := make(map[int]bool)
	for _, f := range files {
		m := resultFile.FindStringSubmatch(f.Name())
		if m == nil {
			continue
		}
		round, err := strconv.Atoi(m[3])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f.Name(), err)
		}
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil {
			return nil, err
		}
		for l := range strings.Lines(string(text)) {
			if rest, ok := strings.CutPrefix(l, "# FAILED,"); ok {
				c.failed = append(c.failed, fmt.Sprintf("round %d: %s", round, strings.TrimSpace(rest)))
			}
		}
		points, err := readPoints(f.Name(), strings.NewReader(string(text)))
		if err != nil {
			return nil, err
		}
		for _, p := range points {
			rounds[round] = true
			c.take(p, round)
		}
	}
	if len(rounds) == 0 {
		return nil, fmt.Errorf("%s has no results: no rows in files named PEER-npN-roundR.csv", dir)
	}
	c.rounds = slices.Sorted(maps.Keys(rounds))
	for name, to := range map[string]func(text string){
		"about.txt":    func(text string) { c.about = strings.Split(strings.TrimSpace(text), "\n") },
		"commands.txt": func(text string) { c.ran = strings.TrimSpace(text) },
	} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil {
			to(string(text))
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return c, nil
}

// take enters a result. Gloo's algorithms are one peer, which has the best of their times: its users may choose.
func (c *comparison) take(p point, round int) {
	peer := p.attrs[attrPeer]
	if strings.HasPrefix(peer, "gloo-") {
		peer = "gloo"
		p.attrs[attrPeer] = peer
	}
	key := caseKey{p.op, p.ranks, p.bytes}
	if c.times[key] == nil {
		c.times[key] = make(map[string]map[int]float64)
	}
	if c.times[key][peer] == nil {
		c.times[key][peer] = make(map[int]float64)
	}
	if old, ok := c.times[key][peer][round]; !ok || p.us < old {
		c.times[key][peer][round] = p.us
	}
}

// best is the least time of the peers in the cases, by round, and the peer that has it most often.
func (c *comparison) best(cases []caseKey, peers []string) (times map[int]float64, who string) {
	times = make(map[int]float64)
	winner := make(map[int]string)
	for _, k := range cases {
		for _, peer := range peers {
			for round, us := range c.times[k][peer] {
				if old, ok := times[round]; !ok || us < old {
					times[round], winner[round] = us, peer
				}
			}
		}
	}
	wins := make(map[string]int)
	for _, peer := range winner {
		wins[peer]++
	}
	for _, peer := range peers {
		if wins[peer] > wins[who] {
			who = peer
		}
	}
	return times, who
}

// ratio is that of times to base, paired by round.
type ratio struct {
	median, low, high float64
	rounds            int
}

func ratioOf(times, base map[int]float64) (r ratio, ok bool) {
	var all []float64
	for round, us := range times {
		if b, both := base[round]; both {
			all = append(all, us/b)
		}
	}
	if len(all) == 0 {
		return r, false
	}
	return ratio{median(all), slices.Min(all), slices.Max(all), len(all)}, true
}

func (r ratio) cell(rounds int) string {
	text := fmt.Sprintf("**%.2f** (%.2f–%.2f)", r.median, r.low, r.high)
	if r.rounds < rounds {
		text += fmt.Sprintf(" of %d", r.rounds)
	}
	return text
}

// isOurs reports whether a peer is this library.
func isOurs(peer string) bool { return peer == ours || strings.HasPrefix(peer, ours+"-") }

// peers are those that have a time at n ranks, ours first.
func (c *comparison) peers(n int) (own, others []string) {
	seen := make(map[string]bool)
	for k, byPeer := range c.times {
		for peer := range byPeer {
			if k.ranks == n {
				seen[peer] = true
			}
		}
	}
	order := []string{"ompi", "ompi-spin", "ompi-tcp", "mpich", "gloo", "torch", "horovod"}
	for _, peer := range slices.Sorted(maps.Keys(seen)) {
		if isOurs(peer) {
			own = append(own, peer)
		} else if !slices.Contains(order, peer) {
			others = append(others, peer)
		}
	}
	for _, peer := range slices.Backward(order) {
		if seen[peer] {
			others = slices.Insert(others, 0, peer)
		}
	}
	return own, others
}

// cases are those of an operation at n ranks, by size.
func (c *comparison) cases(op string, n int) []caseKey {
	var keys []caseKey
	for k := range c.times {
		if k.op == op && k.ranks == n {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b caseKey) int { return int(a.bytes - b.bytes) })
	return keys
}

func (c *comparison) ranks() []int {
	seen := make(map[int]bool)
	for k := range c.times {
		seen[k.ranks] = true
	}
	return slices.Sorted(maps.Keys(seen))
}

// modesOf are the rows that one workload has.
func modesOf(name string) []string {
	var ops []string
	for _, m := range modeNames {
		ops = append(ops, name+"_"+m)
	}
	return ops
}

func caseName(k caseKey) string {
	if k.bytes == 0 {
		return k.op
	}
	for _, name := range WorkloadNames() {
		if mode, ok := strings.CutPrefix(k.op, name+"_"); ok {
			return name + " " + mode
		}
	}
	return k.op + " " + bytesLabel(float64(k.bytes))
}

// Report is a page on the results in a folder: ratios to others, times, and a chart, which is drawn into chart unless
// that is empty.
func Report(dir, chart string) ([]byte, error) {
	c, err := readComparison(dir)
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	b.WriteString(`# Benchmarks

This library beside others, on one machine, in one session. ` + "`make bench-peers`" + ` measures and writes this page; the
programs and their rules are in [bench/peers](../bench/peers/README.md). Everything is float32 sums of CPU memory, in
place, by ranks of one host.

`)
	for _, l := range c.about {
		b.WriteString("- " + l + "\n")
	}
	fmt.Fprintf(&b, "- Rounds: %d, in each of which every program ran once, in turn\n", len(c.rounds))
	if c.ran != "" {
		b.WriteString("\n```sh\n" + c.ran + "\n```\n")
	}
	if chart != "" {
		if err := c.chart(chart); err != nil {
			return nil, err
		}
		fmt.Fprintf(&b, "\n![bus bandwidth of allreduce](%s)\n", filepath.Base(chart))
	}
	b.WriteString(`
` + "`ours`" + ` is package hvd on ordinary Go slices: names, negotiation, cache and fusion included. ` + "`-arena`" + ` has its tensors in the
shared arena, and ` + "`-raw`" + ` is the backend alone. ` + "`ompi`" + ` yields when idle, ` + "`ompi-spin`" + ` spins on a core of its own; ` + "`gloo`" + ` is the
best of its algorithms at each size.

## Ratios

Time relative to others: below 1 is faster. In each round our median is divided by the best of the others' medians of
that round; a cell has the median of these ratios and, in parentheses, the least and the greatest.
`)
	for _, n := range c.ranks() {
		c.ratios(&b, n)
	}
	b.WriteString("\n## Times\n\nThe median of the rounds' medians in µs, and of workloads in ms a step.\n")
	for _, n := range c.ranks() {
		c.timesTable(&b, n)
	}
	if len(c.failed) > 0 {
		b.WriteString("\n## Not finished\n\n")
		for _, f := range c.failed {
			b.WriteString("- " + f + "\n")
		}
	}
	return []byte(b.String()), nil
}

// collectives are in the order of the page.
var collectives = []string{"allreduce", "allgather", "broadcast", "barrier"}

func (c *comparison) ratios(b *strings.Builder, n int) {
	own, others := c.peers(n)
	if len(own) == 0 || len(others) == 0 {
		return
	}
	base := slices.DeleteFunc(slices.Clone(others), func(p string) bool { return !slices.Contains(mpi, p) })
	row := func(name string, cases []caseKey, of caseKey, against []string, scale float64) {
		best, who := c.best(cases, against)
		if len(best) == 0 {
			return
		}
		cells := []string{name, fmt.Sprintf("%s %s", digits(median(slices.Collect(maps.Values(best)))/scale), who)}
		found := false
		for _, peer := range own {
			text := "–"
			if r, ok := ratioOf(c.times[of][peer], best); ok {
				text, found = r.cell(len(c.rounds)), true
			}
			cells = append(cells, text)
		}
		if found {
			fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
		}
	}
	head := func(title, first, second string) {
		fmt.Fprintf(b, "\n%s\n\n| %s |\n|%s\n", title, strings.Join(slices.Concat([]string{first, second}, own), " | "), strings.Repeat("---|", len(own)+2))
	}
	if len(base) > 0 {
		head(fmt.Sprintf("### %d ranks: collectives, relative to the best of Open MPI and MPICH", n), "case", "best, µs")
		for _, op := range collectives {
			for _, k := range c.cases(op, n) {
				row(caseName(k), []caseKey{k}, k, base, 1)
			}
		}
	}
	if !slices.ContainsFunc(WorkloadNames(), func(name string) bool { return len(c.workloadCases(name, n)) > 0 }) {
		return
	}
	head(fmt.Sprintf("### %d ranks: training steps, relative to the best of all others in its best mode", n), "case", "best, ms")
	for _, name := range WorkloadNames() {
		cases := c.workloadCases(name, n)
		for _, k := range cases {
			row(caseName(k), cases, k, others, 1000)
		}
	}
}

func (c *comparison) workloadCases(name string, n int) []caseKey {
	var cases []caseKey
	for _, op := range modesOf(name) {
		cases = append(cases, c.cases(op, n)...)
	}
	return cases
}

func (c *comparison) timesTable(b *strings.Builder, n int) {
	own, others := c.peers(n)
	all := slices.Concat(own, others)
	fmt.Fprintf(b, "\n### %d ranks\n\n| case | %s |\n|%s\n", n, strings.Join(all, " | "), strings.Repeat("---|", len(all)+1))
	row := func(k caseKey, scale float64) {
		cells := []string{caseName(k)}
		for _, peer := range all {
			text := "–"
			if times := c.times[k][peer]; len(times) > 0 {
				text = digits(median(slices.Collect(maps.Values(times))) / scale)
			}
			cells = append(cells, text)
		}
		fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
	}
	for _, op := range collectives {
		for _, k := range c.cases(op, n) {
			row(k, 1)
		}
	}
	for _, name := range WorkloadNames() {
		for _, k := range c.workloadCases(name, n) {
			row(k, 1000)
		}
	}
}

// digits are three that mean something.
func digits(v float64) string {
	switch {
	case v < 10:
		return fmt.Sprintf("%.2f", v)
	case v < 100:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}

// chart draws allreduce at the least number of ranks.
func (c *comparison) chart(file string) error {
	n := c.ranks()[0]
	own, others := c.peers(n)
	chart := Chart{Title: fmt.Sprintf("allreduce, float32 sum, %d ranks on one host", n), YLabel: BusBandwidth.label()}
	for _, peer := range slices.Concat(own, others) {
		s := Series{Name: peer}
		for _, k := range c.cases("allreduce", n) {
			if times := c.times[k][peer]; len(times) > 0 {
				s.X = append(s.X, float64(k.bytes))
				s.Y = append(s.Y, gbps(k.bytes, median(slices.Collect(maps.Values(times))))*2*float64(n-1)/float64(n))
			}
		}
		if len(s.X) > 0 {
			chart.Series = append(chart.Series, s)
		}
	}
	if len(chart.Series) == 0 {
		return fmt.Errorf("chart %s: there is no allreduce at %d ranks", file, n)
	}
	return os.WriteFile(file, chart.SVG(), 0o666)
}
