package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/gohvd/gohvd/internal/joblink"
	"github.com/gohvd/gohvd/internal/live"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/topo"
)

// switching is a request to start or to stop the timelines of a job.
type switching struct {
	Start bool `json:"start"`
	// Path is the path of rank 0's file, or "" for the path of the settings.
	Path string `json:"path,omitempty"`
}

// check returns an error if the path cannot be that of a timeline.
func (s *switching) check() error {
	switch name := strings.TrimSuffix(s.Path, ".gz"); {
	case s.Path == "":
	case logs.Plain(s.Path) != s.Path:
		return fmt.Errorf("timeline: got a file name with control characters, %q", s.Path)
	case !strings.HasSuffix(name, ".json"):
		return fmt.Errorf("timeline: got the file name %q, want one that ends with .json or .json.gz", s.Path)
	}
	return nil
}

// switched says what became of a request to start or to stop the timelines.
type switched struct {
	// Failed says that at least one rank has not done it.
	Failed bool   `json:"failed"`
	Text   string `json:"text"`
}

// switchTimelines asks all ranks to start or to stop their timelines, and sends what became of it.
func (l *liveJob) switchTimelines(w http.ResponseWriter, req *http.Request) {
	var asked switching
	err := json.NewDecoder(http.MaxBytesReader(w, req.Body, maxSwitchBytes)).Decode(&asked)
	if err == nil {
		err = asked.check()
	}
	if err == nil && l.nodes != nil {
		err = errors.New("timeline: the nodes of a parameter server write none")
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	question := joblink.StopTimeline
	if asked.Start {
		question = fmt.Sprintf("%s %s %s", joblink.StartTimeline, time.Now().UTC().Format("20060102T150405"),
			asked.Path)
	}
	ctx, cancel := context.WithTimeout(req.Context(), switchTime)
	defer cancel()
	go func() {
		select {
		case <-l.ended: // answer before the server closes the connection
			cancel()
		case <-ctx.Done():
		}
	}()
	answers, missing, _ := l.reports.ranks.Ask(ctx, question) // an error means that the job is over
	_ = json.NewEncoder(w).Encode(outcomeOf(asked.Start, answers, missing))
}

// maxReasons is how many different errors of ranks a sentence has at most.
const maxReasons = 3

// outcomeOf makes a sentence of the answers of the ranks. Ranks with the same error share a clause. Errors
// that name files differ from rank to rank, so the sentence has only the first ones.
func outcomeOf(start bool, answers map[int][]byte, missing []int) *switched {
	done, first := 0, ""
	failed := make(map[string][]topo.Rank)
	var reasons []string // the keys of failed, in the order of their first ranks
	fail := func(why string, r int) {
		if failed[why] == nil {
			reasons = append(reasons, why)
		}
		failed[why] = append(failed[why], topo.Rank(r))
	}
	for _, r := range slices.Sorted(maps.Keys(answers)) {
		var s live.Switched
		if err := json.Unmarshal(answers[r], &s); err != nil {
			s.Error = "malformed answer: " + err.Error()
		}
		switch {
		case s.Error != "":
			why := strings.TrimPrefix(s.Error, "timeline: ")
			fail(strings.TrimPrefix(why, fmt.Sprintf("rank %d: ", r)), r)
		case s.File != "":
			if done++; first == "" {
				first = fmt.Sprintf("rank %d to %s", r, s.File)
			}
		}
	}
	for _, r := range missing {
		fail("no answer", r)
	}
	verb := "stopped"
	if start {
		verb = "started"
	}
	text := fmt.Sprintf("%d of %d ranks have %s a timeline", done, len(answers)+len(missing), verb)
	if first != "" {
		text += ": " + first
	}
	for _, why := range reasons[:min(len(reasons), maxReasons)] {
		text += fmt.Sprintf("; %s: %s", topo.FormatRanks(failed[why]), why)
	}
	if n := len(reasons) - maxReasons; n > 0 {
		text += fmt.Sprintf("; and %d more errors", n)
	}
	return &switched{Failed: len(failed) > 0, Text: text + "."}
}

// switchTimelines starts or stops the timelines of the job.
func (a *jobAddress) switchTimelines(ctx context.Context, s switching) (*switched, error) {
	body, err := json.Marshal(&s)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, switchTime+aboutTime)
	defer cancel()
	response, err := a.send(ctx, http.MethodPost, timelinePath, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer response.Close()
	got := new(switched)
	return got, json.NewDecoder(io.LimitReader(response, maxStateBytes)).Decode(got)
}

// switchOnce starts or stops the timelines of the job and prints what became of it.
func (r *runner) switchOnce(ctx context.Context, j *jobAddress, s switching) error {
	if err := s.check(); err != nil {
		return usagef("%s: %v", topCommand, err)
	}
	got, err := j.switchTimelines(ctx, s)
	if err != nil {
		return fmt.Errorf("%s: %w", topCommand, err)
	}
	if got.Failed {
		r.status = statusFailure
	}
	_, err = fmt.Fprintln(r.stdout, logs.Plain(got.Text))
	return err
}
