package main

import (
	"context"
	"errors"
	"strings"
	"sync"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/gohvd/gohvd/internal/live/table"
)

// topScreen shows the job on the terminal until the user quits.
func (r *runner) topScreen(ctx context.Context, j *jobAddress, every time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s := &screen{}
	p := tea.NewProgram(s, tea.WithContext(ctx), tea.WithEnvironment(r.env), tea.WithOutput(r.stdout),
		tea.WithoutSignalHandler())
	var switches sync.WaitGroup
	s.view.Switch = func(start bool) {
		switches.Go(func() {
			got, err := j.switchTimelines(ctx, switching{Start: start})
			if err != nil {
				got = &switched{true, err.Error()}
			}
			p.Send(*got)
		})
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		j.follow(ctx, every, func(u update) bool {
			r.noteEnd(u)
			p.Send(u)
			return true
		})
	}()
	_, err := p.Run()
	cancel()
	<-done
	switches.Wait()
	if errors.Is(err, tea.ErrProgramKilled) { // by the end of ctx
		return nil
	}
	return err
}

// screen connects package table with the terminal.
type screen struct {
	view    table.View
	history table.History
	now     table.States
	// newest is the newest state, which is not shown while the view is paused.
	newest table.States
}

func (s *screen) Init() tea.Cmd { return nil }

func (s *screen) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch m := msg.(type) {
	case tea.WindowSizeMsg:
		s.view.Width, s.view.Height = m.Width, m.Height
	case tea.KeyPressMsg:
		if !s.view.Key(m.String(), &s.now) {
			return s, tea.Quit
		}
	case switched:
		s.view.Switched = m.Text
	case update:
		s.newest.Note = m.note
		if m.job != nil {
			s.newest = s.history.Add(m.job)
		} else {
			s.newest.At = time.Now()
		}
	}
	if !s.view.Paused {
		s.now = s.newest
	}
	return s, nil
}

// codes are the sequences that begin the styles (ECMA-48, select graphic rendition). Red and yellow are the
// terminal's own, so that they fit its background. bubbletea leaves out the colours that the terminal cannot
// show, and all of them with NO_COLOR.
var codes = [...]string{
	table.Normal: "", table.Strong: "\x1b[1m", table.Faint: "\x1b[2m", table.Warning: "\x1b[33m",
	table.Alarm: "\x1b[1;31m", table.Picked: "\x1b[7m",
}

func (s *screen) View() tea.View {
	var b strings.Builder
	if s.view.Width > 0 {
		for i, line := range s.view.Lines(&s.now) {
			if i > 0 {
				b.WriteByte('\n')
			}
			for _, span := range line {
				if code := codes[span.Style]; code != "" {
					b.WriteString(code + span.Text + "\x1b[m")
				} else {
					b.WriteString(span.Text)
				}
			}
		}
	}
	v := tea.NewView(b.String())
	v.AltScreen = true
	return v
}
