-- The registry's file, version 1 (PRAGMA user_version). What a version holds lies beside it, in
-- versions/ID: rows here only say what there is and which alias names it.

CREATE TABLE IF NOT EXISTS version (
    id     TEXT PRIMARY KEY,  -- Card.version: a digest of the card, with those of the weights in it
    model  TEXT NOT NULL,
    rule   TEXT NOT NULL,
    method TEXT NOT NULL,
    parent TEXT REFERENCES version (id),  -- the champion when this one was registered
    note   TEXT NOT NULL
) STRICT;

CREATE TABLE IF NOT EXISTS alias (
    model   TEXT NOT NULL,
    rule    TEXT NOT NULL,
    method  TEXT NOT NULL,
    name    TEXT NOT NULL CHECK (name IN ('champion', 'candidate', 'previous')),
    version TEXT NOT NULL REFERENCES version (id),
    PRIMARY KEY (model, rule, method, name)
) STRICT, WITHOUT ROWID;

-- Append-only: `hash` covers the row and the hash of the one before it.
CREATE TABLE IF NOT EXISTS event (
    number  INTEGER PRIMARY KEY,
    at      TEXT NOT NULL,
    actor   TEXT NOT NULL,
    kind    TEXT NOT NULL,
    version TEXT NOT NULL REFERENCES version (id),
    mode    TEXT NOT NULL,  -- that the version was set to; empty where none was
    gate    TEXT NOT NULL,  -- guard.rule.Gate as JSON; as empty
    reason  TEXT NOT NULL,
    hash    TEXT NOT NULL
) STRICT;

CREATE TRIGGER IF NOT EXISTS event_is_kept BEFORE UPDATE ON event
BEGIN SELECT raise(ABORT, 'events are append-only'); END;
CREATE TRIGGER IF NOT EXISTS event_stays BEFORE DELETE ON event
BEGIN SELECT raise(ABORT, 'events are append-only'); END;
CREATE TRIGGER IF NOT EXISTS version_is_immutable BEFORE UPDATE ON version
BEGIN SELECT raise(ABORT, 'versions are immutable'); END;

-- The events that set the mode of a rule's champion (`is_trial` 0), else it is enforced; and of the
-- version on trial beside it.
CREATE TABLE IF NOT EXISTS mode (
    model    TEXT NOT NULL,
    rule     TEXT NOT NULL,
    method   TEXT NOT NULL,
    is_trial INTEGER NOT NULL,
    event    INTEGER NOT NULL REFERENCES event (number),
    PRIMARY KEY (model, rule, method, is_trial)
) STRICT, WITHOUT ROWID;
