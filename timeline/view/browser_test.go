package view

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/timeline/report"
)

// tab is a page in a browser without a screen.
type tab struct {
	testing.TB
	ctx context.Context
	mu  sync.Mutex
	// faults are errors of scripts, and what the browser has blocked.
	faults []string
}

// tabTime is how long a page may be open, and axeTime one that axe checks, which takes minutes on a busy
// machine.
const tabTime, axeTime = 4 * time.Minute, 8 * time.Minute

// openTab opens a page for tabTime.
func openTab(t testing.TB, url string) *tab {
	t.Helper()
	return openTabFor(t, url, tabTime)
}

// openTabFor opens a page for a limited time. It skips the test if there is no Chromium; in CI, which has it,
// it fails the test.
func openTabFor(t testing.TB, url string, limit time.Duration) *tab {
	t.Helper()
	program := ""
	for _, name := range []string{"chromium-headless-shell", "chromium", "google-chrome"} {
		if at, err := exec.LookPath(name); err == nil && program == "" {
			program = at
		}
	}
	if program == "" {
		if os.Getenv("CI") != "" {
			t.Fatal("there is no Chromium: install chromium-headless-shell and fonts-dejavu-core")
		}
		t.Skip("there is no Chromium: the page is not tested in a browser (Debian: chromium-headless-shell, fonts-dejavu-core)")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(program), chromedp.NoSandbox)
	ctx, stop := context.WithTimeout(t.Context(), limit)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)
	p := &tab{TB: t, ctx: ctx}
	err := chromedp.Listen(ctx, func(event any) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			p.faults = append(p.faults, fmt.Sprint(e.ExceptionDetails.Text, e.ExceptionDetails.Exception))
		case *log.EventEntryAdded:
			p.faults = append(p.faults, e.Entry.Text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	p.do(chromedp.EmulateViewport(1400, 900), chromedp.Navigate(url))
	return p
}

func (p *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	p.Helper()
	if err := chromedp.Do(p.ctx, steps...); err != nil {
		p.Fatal(err)
	}
}

// text returns the value of an expression, which is a string.
func (p *tab) text(expression string) string {
	p.Helper()
	text, err := chromedp.Run(p.ctx, chromedp.Evaluate[string](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		p.Fatalf("%.200s: %v", expression, err)
	}
	return text
}

// list stores the value of an expression in v.
func (p *tab) list(expression string, v any) {
	p.Helper()
	if err := json.Unmarshal([]byte(p.text("JSON.stringify("+expression+")")), v); err != nil {
		p.Fatal(err)
	}
}

// wait waits until an expression is true.
func (p *tab) wait(expression string) {
	p.Helper()
	_, err := chromedp.Run(p.ctx, chromedp.Poll[bool](expression, chromedp.WithPollingTimeout(tabTime/2)))
	if err != nil {
		p.noFaults()
		p.Fatalf("%.200s: %v; the page says %q", expression, err, p.text("document.body.innerText.slice(0, 500)"))
	}
}

// ready waits until the page is complete.
func (p *tab) ready() {
	p.Helper()
	p.wait(`document.documentElement.dataset.ready === "true"`)
	p.still()
}

// still waits until nothing is drawn any more.
func (p *tab) still() {
	p.Helper()
	p.text(`(async () => {
		for (let same = 0, last = -1; same < 6;) {
			await new Promise(r => setTimeout(r, 30));
			same = drawn.frames === last ? same + 1 : 0;
			last = drawn.frames;
		}
		return '';
	})()`)
}

// place returns where a point of an element is, after it was scrolled into view.
func (p *tab) place(id string, dx, dy float64) (x, y float64) {
	p.Helper()
	var at []float64
	p.list(`(() => {
		const e = document.getElementById("`+id+`");
		e.scrollIntoView({ block: "center", behavior: "instant" });
		const r = e.getBoundingClientRect();
		return [r.left, r.top];
	})()`, &at)
	return at[0] + dx, at[1] + dy
}

func (p *tab) noFaults() {
	p.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.faults) > 0 {
		p.Errorf("the browser reports: %s", strings.Join(p.faults, "\n"))
	}
}

// serve serves a page and returns its server.
func serve(t testing.TB, source Source) *Server {
	t.Helper()
	return serveAs(t, func(addr string) *Server { return NewServer(source, addr) })
}

func serveLive(t testing.TB, l *Live) *Server {
	t.Helper()
	return serveAs(t, func(addr string) *Server { return NewLiveServer(l, addr) })
}

func serveAs(t testing.TB, newServer func(addr string) *Server) *Server {
	t.Helper()
	l := testnet.Listen(t)
	s := newServer(l.Addr().String())
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return s
}

// parseMicros reads a time as the page shows it.
func parseMicros(t *testing.T, text string) float64 {
	t.Helper()
	number, unit, _ := strings.Cut(text, " ")
	n, err := strconv.ParseFloat(number, 64)
	if err != nil {
		t.Fatalf("got the time %q: %v", text, err)
	}
	return n * map[string]float64{"us": 1, "ms": 1e3, "s": 1e6}[unit]
}

// The numbers on the page are those of the report, as hvdrun timeline --json prints them.
func TestPageShowsTheReport(t *testing.T) {
	v := straggler.read(t)
	r := v.report
	p := openTab(t, serve(t, v).URL())
	p.ready()
	sentence := strings.ToUpper(r.Lateness.Verdict[:1]) + r.Lateness.Verdict[1:] + "."
	if got := p.text(`document.getElementById("sentence").textContent`); got != sentence {
		t.Errorf("got the sentence %q, want %q", got, sentence)
	}
	same := func(what, text string, want float64) {
		t.Helper()
		if got := parseMicros(t, text); math.Abs(got-want) > 0.006*want+0.006 {
			t.Errorf("%s: got %q, want %g us", what, text, want)
		}
	}
	var tiles []string
	p.list(`[...document.querySelectorAll("#numbers .value")].map(e => e.textContent)`, &tiles)
	for i, want := range []float64{r.StepUS, r.StepP99US, r.Lateness.GainUS, r.Lateness.AnybodyUS} {
		same(fmt.Sprint("number ", i), tiles[i], want)
	}
	table := func(name string) (rows [][]string) {
		t.Helper()
		p.do(chromedp.Navigate(p.text(`location.href.split("#")[0]`) + "#table=" + name))
		p.wait(`document.getElementById("tab-` + name + `").getAttribute("aria-selected") === "true"`)
		p.list(`[...document.querySelectorAll("#table tbody tr")].map(r => [...r.children].map(c => c.textContent))`,
			&rows)
		return rows
	}
	ranks := table("ranks")
	for i, row := range ranks {
		rank, err := strconv.Atoi(row[0])
		if err != nil {
			t.Fatal(err)
		}
		l := r.Lateness.Ranks[rank]
		if i == 0 && rank != 2 {
			t.Errorf("got rank %d first, want rank 2", rank)
		}
		for column, want := range map[int]float64{2: l.HeldUS, 3: l.HeldPerStepUS, 5: l.CausedUS, 7: l.P50US,
			8: l.P90US, 9: l.P99US, 10: l.MaxUS, 11: r.Phases[rank].US["waiting"],
			12: r.Phases[rank].US["outside"]} {
			same(fmt.Sprintf("rank %d, column %d", rank, column), row[column], want)
		}
		if want := strconv.FormatInt(l.Last, 10); row[4] != want {
			t.Errorf("rank %d: got %s operations, want %s", rank, row[4], want)
		}
	}
	hosts := table("hosts")
	for i, row := range hosts {
		same("host "+row[0], row[3], r.Hosts[i].CausedUS)
	}
	tensors := table("tensors")
	for i, row := range tensors {
		x := r.TensorTable[i]
		if row[0] != x.Name || row[7] != strconv.FormatUint(x.Count, 10) {
			t.Errorf("got the tensor %q, want %+v", row, x)
		}
		for column, want := range map[int]float64{2: x.WaitedUS, 3: x.TotalUS, 4: x.MeanUS, 5: x.P99US,
			6: x.MaxUS} {
			same(fmt.Sprintf("%s, column %d", x.Name, column), row[column], want)
		}
	}
	steps := table("steps")
	for _, row := range steps {
		n, err := strconv.Atoi(row[0])
		if err != nil {
			t.Fatal(err)
		}
		s := r.StepList[n]
		for text, want := range map[string]float64{row[1]: s.BeginUS - micros(v.Begin), row[2]: s.LengthUS,
			row[3]: s.AnyHeldUS, row[5]: s.WaitedUS} {
			same(fmt.Sprint("step ", n), text, want)
		}
	}
	if len(ranks) != 4 || len(hosts) != 2 || len(tensors) != 6 || len(steps) != int(r.Steps) {
		t.Errorf("got tables of %d, %d, %d and %d rows", len(ranks), len(hosts), len(tensors), len(steps))
	}
	p.noFaults()
}

// The page, also an exported one, shows the comparison with another run.
func TestPageShowsTheComparison(t *testing.T) {
	job := testJob{ranks: 2, hosts: 1, tensors: 3, steps: 120, compute: 8000, late: -1, names: hostile}
	v := job.read(t)
	job.compute = 8800
	v.Compared = report.Compare(v.Report(), job.read(t).Report(), "/home/secret/a", "b/")
	var exported bytes.Buffer
	if err := Export(&exported, v); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "out.html")
	if err := os.WriteFile(file, exported.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{serve(t, v).URL(), "file://" + file} {
		p := openTabFor(t, url, axeTime)
		p.ready()
		sentence := p.text(`document.getElementById("compare-sentence").textContent`)
		if !strings.HasPrefix(sentence, "A step takes 9.1 % longer in B (median ") ||
			!strings.HasSuffix(sentence, "; no difference found in 3 tensors.") {
			t.Errorf("got the sentence %q", sentence)
		}
		var rows [][]string
		p.list(`[...document.querySelectorAll("#compare-table tbody tr")].map(r => [...r.children].map(c => c.textContent))`,
			&rows)
		if len(rows) != len(v.Compared.Rows) || len(rows) != 6 {
			t.Fatalf("got %d rows, want 6: %q", len(rows), rows)
		}
		for i, d := range v.Compared.Rows {
			row := rows[i]
			for column, want := range map[int]float64{1: d.AUS, 2: d.BUS, 3: d.DiffUS, 5: d.LowUS,
				6: d.HighUS} {
				if got := parseMicros(t, row[column]); math.Abs(got-want) > 0.006*math.Abs(want)+0.006 {
					t.Errorf("%s, column %d: got %q, want %g us", row[0], column, row[column], want)
				}
			}
			if want := fmt.Sprintf("%+.1f %%", 100*d.Share); i == 0 && row[4] != want {
				t.Errorf("%s: got %q, want %q", row[0], row[4], want)
			}
			if want := map[bool]string{true: "yes", false: "no difference found"}[d.Differs]; row[7] != want {
				t.Errorf("%s: got %q, want %q", row[0], row[7], want)
			}
			if d.What != "tensor" {
				continue
			}
			at := slices.IndexFunc(v.report.TensorTable,
				func(x report.Tensor) bool { return x.Name == d.Tensor })
			if mean := v.report.TensorTable[at].MeanUS; d.DiffUS != 0 || math.Abs(d.AUS-mean) > 0.05*mean {
				t.Errorf("got %+v, want the same times, of about %g us", d, mean)
			}
		}
		all := p.text(`document.getElementById("compare-section").textContent`)
		if is := strings.Contains(all, "secret"); is != strings.HasPrefix(url, "http") {
			t.Errorf("%s: the folder of a run is shown: %v", url, is)
		}
		p.text(axe(t) + `; ""`)
		p.noViolations("the comparison")
		p.noFaults()
	}
}

// Each frame draws at most 5,000 rectangles and 12 bitmaps, and no tile is fetched twice.
// Keys and Back change what is shown, and the address has it.
func TestFramesAreBounded(t *testing.T) {
	v := testJob{ranks: 64, hosts: 8, tensors: 30, steps: 20, compute: 20000, late: 37, lateBy: 9000}.read(t)
	asked := make(map[string]int) // the requests for each tile
	var mu sync.Mutex
	web := httptest.NewUnstartedServer(nil)
	s := NewServer(v, web.Listener.Addr().String())
	web.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/data/tile" {
			mu.Lock()
			asked[r.URL.RawQuery]++
			mu.Unlock()
		}
		s.ServeHTTP(w, r)
	})
	web.Start()
	defer web.Close()
	p := openTab(t, s.URL())
	p.ready()
	p.text(`document.getElementById("timeline").focus() ?? ""`)
	for _, keys := range []string{"wwww", "dddd", "wwwwww", "aaaaa", "....", ",,", "ssss", "0", "...", "wwwwwwww"} {
		p.do(chromedp.KeyEvent(keys))
		p.still()
	}
	p.text(`[...document.querySelectorAll("#table button.link")].find(b => b.textContent === "37").click() ?? ""`)
	p.wait(`location.hash.includes("open=37")`)
	p.still()
	p.do(chromedp.KeyEvent("wwww"))
	p.still()
	p.text(`document.getElementById("align-step").click() ?? ""`)
	p.wait(`location.hash.includes("align=step")`)
	p.still()
	p.text(`history.back() ?? ""`)
	p.wait(`!location.hash.includes("align=step") && location.hash.includes("open=37")`)
	p.still()
	var drawn struct{ Frames, MostRectangles, MostBitmaps int }
	p.list(`drawn`, &drawn)
	if drawn.MostRectangles > 5000 || drawn.MostBitmaps > 12 || drawn.Frames < 20 || drawn.MostBitmaps == 0 ||
		drawn.MostRectangles < 100 {
		t.Errorf("got %+v, want at most 5000 rectangles and 12 bitmaps", drawn)
	}
	mu.Lock()
	defer mu.Unlock()
	for tile, n := range asked {
		if n > 1 {
			t.Errorf("%s was fetched %d times", tile, n)
		}
	}
	if len(asked) < 10 {
		t.Errorf("only %d tiles were fetched", len(asked))
	}
	p.noFaults()
}

var longName = strings.Repeat("long", 50_000)

var hostile = []string{
	`<img src=x onerror="document.title='hacked'">`, `</script><script>document.title='hacked'</script>`,
	`"><svg onload=alert(1)>`, "\u202egnp.elif\u2066", "\x1b[31mred\x1b[0m", "a\x00b", "__proto__", "constructor",
	longName, "", "a\nb\tc", "${alert(1)}", "%s%n", "javascript:alert(1)",
}

// Names of tensors do nothing but to be shown, in the page and in an exported page.
func TestHostileNames(t *testing.T) {
	v := testJob{ranks: 2, tensors: len(hostile), steps: 6, compute: 3000, late: 1, lateBy: 2000,
		lateFrom: slices.Index(hostile, longName), names: hostile}.read(t)
	v.Title = hostile[0]
	for i := range v.Ranks {
		v.Ranks[i].Host = hostile[i]
	}
	v.report.Problems = append(v.report.Problems, hostile[0])
	var exported bytes.Buffer
	if err := Export(&exported, v); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(exported.String(), "hacked") {
		t.Error("the exported page has a name as markup")
	}
	file := filepath.Join(t.TempDir(), "out.html")
	if err := os.WriteFile(file, exported.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, url := range []string{serve(t, v).URL(), "file://" + file} {
		p := openTab(t, url)
		p.ready()
		if wide := p.text(`String(document.documentElement.scrollWidth)`); wide != "1400" {
			t.Errorf("%s: the page is %s pixels wide, want 1400", url, wide)
		}
		// uPlot is in the exported page as such a script.
		elements := p.text(`String(document.querySelectorAll("img, svg, script:not([src]):not([type])").length)`)
		if want := strconv.Itoa(strings.Count(url, "file:")); elements != want {
			t.Errorf("got %s elements of a name, want %s", elements, want)
		}
		for _, table := range []string{"tensors", "hosts"} {
			p.text(`document.getElementById("tab-` + table + `").click() ?? ""`)
			p.still()
		}
		p.text(`document.getElementById("tab-tensors").click() ?? ""`)
		all := p.text(`document.getElementById("table").textContent`)
		testnet.WantText(t, all, hostile[0], `\u202egnp.elif\u2066`, `\u001b[31mred`, `a\u0000b`, `a\u000ab\u0009c`,
			"__proto__")
		if strings.ContainsAny(all, "\u202e\u2066\x1b\x00\n") {
			t.Error("the table of tensors has a control character")
		}
		// Each tensor can be shown on all ranks.
		p.text(`(async () => {
			for (let i = 0; i < ` + strconv.Itoa(len(hostile)) + `; i++) {
				document.querySelectorAll("#table button.link")[i].click();
				await new Promise(r => setTimeout(r, 20));
			}
			return "";
		})()`)
		p.still()
		note := p.text(`document.getElementById("timeline-note").textContent`)
		if is := strings.Contains(note, "exported without this detail"); is != strings.HasPrefix(url, "file:") {
			t.Errorf("%s: a tensor on all ranks: the note is %q", url, note)
		}
		if title := p.text(`document.title`); !strings.HasPrefix(title, "Timelines: <img") {
			t.Errorf("got the title %q", title)
		}
		p.noFaults()
	}
	// If a script of the page did use a name as markup, the browser would refuse it.
	p := openTab(t, serve(t, v).URL())
	p.ready()
	got := p.text(`(() => { try { document.body.innerHTML = "<b>x</b>"; return "allowed"; } catch (e) { return e.name; } })()`)
	if got != "TypeError" {
		t.Errorf("setting markup: got %s, want a TypeError of trusted types", got)
	}
}

// A browser that is led to the page by a file, as with --open, has access.
func TestRedirect(t *testing.T) {
	s := serve(t, straggler.read(t))
	file := filepath.Join(t.TempDir(), "open.html")
	if err := os.WriteFile(file, s.Redirect(), 0o600); err != nil {
		t.Fatal(err)
	}
	p := openTab(t, "file://"+file)
	const arrived = `location.protocol === "http:" && document.documentElement.dataset.ready === "true"`
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		// While the browser goes from one page to the other, it may be unable to evaluate anything.
		is, err := chromedp.Run(p.ctx, chromedp.Evaluate[bool](arrived))
		if err == nil && is {
			break
		}
		if time.Since(begun) > time.Minute {
			t.Fatalf("the page is not there after a minute: %v", err)
		}
	}
	p.ready()
	p.noFaults()
}

// TestKeysAndTools uses the keys and the tools of the page.
func TestKeysAndTools(t *testing.T) {
	v := straggler.read(t)
	p := openTab(t, serve(t, v).URL())
	p.ready()
	// The chosen row has a frame.
	p.text(`document.getElementById("timeline").focus() ?? ""`)
	p.do(chromedp.KeyEvent(kb.ArrowDown))
	p.still()
	var pixel, focus []int
	p.list(`[...document.getElementById("timeline").getContext("2d").getImageData(1, 34 + 32 + 16, 1, 1).data].slice(0, 3)`,
		&pixel)
	p.list(`getComputedStyle(document.documentElement).getPropertyValue("--focus").trim().slice(1).match(/../g).map(x => parseInt(x, 16))`,
		&focus)
	if !slices.Equal(pixel, focus) {
		t.Errorf("the edge of the chosen row has the colour %v, want %v", pixel, focus)
	}
	// The keys zoom within the picture, also if the time of the last click is not in it.
	view := func() (from, to float64) {
		t.Helper()
		var both []float64
		p.wait(`location.hash.includes("from=")`)
		p.list(`["from", "to"].map(k => Number(new URLSearchParams(location.hash.slice(1)).get(k)))`, &both)
		return both[0], both[1]
	}
	begin := func(n int) float64 { return v.report.StepList[n].BeginUS - micros(v.Begin) }
	window, err := v.Window("")
	if err != nil {
		t.Fatal(err)
	}
	var wide float64
	p.list(`document.getElementById("timeline").clientWidth`, &wide)
	share := (begin(1) + 1000 - window.FromUS) / (window.ToUS - window.FromUS)
	x, y := p.place("timeline", 150+share*(wide-150), 50)
	p.do(chromedp.MouseClickXY(x, y, chromedp.ButtonRight))
	p.text(`fetch("data/info").then(() => "")`) // an answer to the click would come before
	p.still()
	if hash := p.text(`location.hash`); strings.Contains(hash, "op=") {
		t.Errorf("a click of the right button chooses an operation: %s", hash)
	}
	p.do(chromedp.MouseClickXY(x, y))
	p.wait(`location.hash.includes("op=")`)
	p.do(chromedp.KeyEvent(".."))
	from, to := view()
	p.do(chromedp.KeyEvent("w"))
	p.wait(`!location.hash.includes("from=` + strconv.FormatFloat(from, 'f', -1, 64) + `&")`)
	if a, b := view(); a < from || b > to {
		t.Errorf("w shows %g to %g us, want a part of %g to %g", a, b, from, to)
	}
	// A tile whose fetch has failed is asked for again.
	p.text(`(() => {
		const real = fetch;
		globalThis.asked = [];
		globalThis.fetch = async address => {
			asked.push(address);
			if (asked.length === 1) throw new TypeError("broken");
			return real(address);
		};
		return "";
	})()`)
	for p.text(`String(asked.length)`) == "0" {
		p.do(chromedp.KeyEvent("w"))
		p.still()
	}
	p.wait(`document.getElementById("timeline-note").textContent.includes("does not answer")`)
	p.do(chromedp.KeyEvent(kb.ArrowDown))
	p.wait(`asked.slice(1).includes(asked[0])`)
	// The brush, by its fields and by the mouse.
	p.text(`(() => {
		document.getElementById("brush-from").value = 3;
		document.getElementById("brush-to").value = 4;
		document.getElementById("brush").requestSubmit();
		return "";
	})()`)
	p.wait(`location.hash.includes("from=")`)
	last := v.report.StepList[4]
	room := (begin(4) + last.LengthUS - begin(3)) / 10
	if a, b := view(); math.Abs(a-begin(3)+room) > 1 || math.Abs(b-begin(4)-last.LengthUS-room) > 1 {
		t.Errorf("the brush shows %g to %g us, want steps 3 and 4 from %g us", a, b, begin(3))
	}
	x, y = p.place("strip", 600, 60)
	p.do(chromedp.MouseEvent(chromedp.MousePressed, x, y, chromedp.ButtonLeft),
		chromedp.MouseEvent(chromedp.MouseMoved, x+200, y, chromedp.ButtonLeft))
	p.wait(`document.querySelector("#strip .u-select").offsetWidth > 100`) // uPlot draws it in the next frame
	p.do(chromedp.MouseEvent(chromedp.MouseReleased, x+200, y, chromedp.ButtonLeft))
	p.wait(`document.getElementById("brush-from").value !== "3"`)
	// Sort, filter and copy.
	column := func() (rows []string) {
		p.list(`[...document.querySelectorAll("#table tbody tr")].map(r => r.firstElementChild.textContent)`, &rows)
		return rows
	}
	for range 2 {
		p.text(`[...document.querySelectorAll("#table thead button")].find(b => /^rank/.test(b.textContent)).click() ?? ""`)
	}
	p.wait(`location.hash.includes("sort=rank%2Fup")`)
	if got := column(); !slices.Equal(got, []string{"0", "1", "2", "3"}) {
		t.Errorf("sorted by rank: got %q", got)
	}
	p.text(`(() => {
		navigator.clipboard.writeText = async text => { globalThis.copied = text; };
		document.getElementById("filter").value = "NODE1";
		document.getElementById("filter").dispatchEvent(new Event("input"));
		document.getElementById("copy").click();
		return "";
	})()`)
	p.wait(`!!globalThis.copied`)
	copied := strings.Split(p.text(`copied`), "\n")
	if got := column(); len(got) != 2 || len(copied) != 4 || !strings.HasPrefix(copied[0], "rank\thost\theld up all\t") ||
		!strings.HasPrefix(copied[1], got[0]+"\tnode1\t") {
		t.Errorf("filtered: got the ranks %q, and copied %q", got, copied)
	}
	p.noFaults()
}

// An answer that comes after the choice of something else is not shown.
func TestLateAnswers(t *testing.T) {
	p := openTab(t, serve(t, straggler.read(t)).URL())
	p.ready()
	p.text(`(() => {
		const real = fetch;
		globalThis.fetch = async address => {
			const answer = await real(address);
			if (address.includes("name=held")) {
				await new Promise(done => { globalThis.release = done; });
				globalThis.release = undefined;
			}
			return answer;
		};
		globalThis.choose = metric => {
			document.getElementById("metric").value = metric;
			document.getElementById("metric").dispatchEvent(new Event("change"));
			return "";
		};
		return "";
	})()`)
	most := func() string { return p.text(`document.getElementById("heat-most").textContent`) }
	caused := most()
	p.text(`choose("held")`)
	p.wait(`!!globalThis.release`)
	p.text(`choose("waited")`)
	p.wait(`document.getElementById("heat-most").textContent !== "` + caused + `"`)
	waited := most()
	p.text(`release() ?? ""`)
	p.wait(`!globalThis.release`)
	p.still()
	if got := most(); got != waited {
		t.Errorf("got %s, as the late answer has it, want %s", got, waited)
	}
}

// axe is axe-core 4.12.1 (MPL-2.0; its SHA-256 is 84494fec), which finds faults that keep people out.
func axe(t *testing.T) string {
	t.Helper()
	f, err := os.Open("testdata/axe.min.js.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(z); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// noViolations reports what axe finds.
func (p *tab) noViolations(what string) {
	p.Helper()
	found := p.text(`axe.run(document, { resultTypes: ["violations"] }).then(r => JSON.stringify(
		r.violations.map(v => v.id + ": " + v.help + ": " + v.nodes.map(n => n.target.join(" ") + " " + (n.any[0]?.message ?? "")).join("; "))))`)
	if found != "[]" {
		p.Errorf("%s: %s", what, found)
	}
}

func TestAccessibility(t *testing.T) {
	v := straggler.read(t)
	v.report.Problems = append(v.report.Problems, "a note")
	p := openTabFor(t, serve(t, v).URL(), axeTime)
	p.ready()
	p.text(axe(t) + `; ""`)
	check := p.noViolations
	for _, theme := range []string{"light", "dark"} {
		p.wait(`(document.documentElement.dataset.shown === "` + theme + `") || (document.getElementById("theme").click(), false)`)
		p.still()
		check(theme)
		for _, table := range []string{"tensors", "steps"} {
			p.text(`document.getElementById("tab-` + table + `").click() ?? ""`)
			p.still()
			check(theme + ", " + table)
		}
		p.text(`document.getElementById("timeline").focus() ?? ""`)
		p.text(`location.hash = "op=1.30&rank=1&open=1"`)
		p.wait(`!document.getElementById("detail").hidden && !!document.querySelector("#detail table")`)
		p.do(chromedp.EmulateViewport(700, 450)) // as a window of 1400 pixels at 200 %
		p.still()
		if wide := p.text(`String(document.documentElement.scrollWidth)`); wide != "700" {
			t.Errorf("at 200 %% the page is %s pixels wide, want 700", wide)
		}
		check(theme + ", an operation, at 200 %")
		p.do(chromedp.EmulateViewport(1400, 900))
		p.text(`document.getElementById("help-open").click() ?? ""`)
		check(theme + ", keys")
		p.text(`document.getElementById("help-close").click() ?? ""`)
	}
	p.noFaults()
}

// If the server has ended, or the address has been used, the page says so in a sentence.
func TestPageSaysWhatIsWrong(t *testing.T) {
	v := straggler.read(t)
	l := testnet.Listen(t)
	s := NewServer(v, l.Addr().String())
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx, l) }()
	url := s.URL()
	p := openTab(t, url)
	p.ready()
	other := openTab(t, url)
	if text := other.text(`document.body.innerText`); !strings.Contains(text, "This address has expired, because it works once") {
		t.Errorf("the used address says %q", text)
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	p.text(`document.getElementById("align-step").click() ?? ""`)
	p.wait(`document.getElementById("timeline-note").textContent.includes("does not answer")`)
	// The heat map does not show another metric than the chosen one.
	p.text(`(() => {
		document.getElementById("metric").value = "held";
		document.getElementById("metric").dispatchEvent(new Event("change"));
		return "";
	})()`)
	p.wait(`document.getElementById("heat").hidden && document.getElementById("heat-note").textContent.includes("does not answer")`)
}

// If an entry of the list of steps stands for several steps, the brush finds it by each of their numbers.
func TestBrushOfJoinedSteps(t *testing.T) {
	v := testJob{ranks: 2, tensors: 1, steps: 9000, compute: 1000, late: -1}.read(t)
	s := v.report.StepList
	if s[1].Steps < 2 {
		t.Fatalf("got an entry for each of %d steps, want fewer entries", len(s))
	}
	p := openTab(t, serve(t, v).URL())
	p.ready()
	last := s[len(s)-1]
	value := p.text(`document.getElementById("brush-to").value`)
	if want := fmt.Sprint(int64(last.Number) + last.Steps - 1); value != want {
		t.Errorf("the last step is %s, want %s", value, want)
	}
	for _, c := range []struct {
		number uint64
		want   report.Step
	}{{s[1].Number + 1, s[1]}, {last.Number + 100, last}} {
		p.text(fmt.Sprintf(`(() => {
			document.getElementById("brush-from").value = document.getElementById("brush-to").value = %d;
			document.getElementById("brush").requestSubmit();
			return "";
		})()`, c.number))
		p.still()
		var from, to float64
		p.list(`Number(new URLSearchParams(location.hash.slice(1)).get("from"))`, &from)
		p.list(`Number(new URLSearchParams(location.hash.slice(1)).get("to"))`, &to)
		begin := c.want.BeginUS - micros(v.Begin)
		if from > begin || from < begin-c.want.LengthUS/2 || to < begin || to > begin+1.5*c.want.LengthUS {
			t.Errorf("step %d: got %g to %g us, want %g us from %g us", c.number, from, to, c.want.LengthUS, begin)
		}
	}
	p.noFaults()
}
