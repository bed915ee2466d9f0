-- Written by `python -m coterie.store.newest --write`: what the migrations to this revision leave behind.
-- Revision: data_owner_0004
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('data_owner_0004');
CREATE TABLE batches (
	number INTEGER NOT NULL, 
	owner BLOB NOT NULL, 
	user BLOB NOT NULL, 
	first INTEGER NOT NULL, 
	length INTEGER NOT NULL, 
	records BLOB NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (owner, user, first)
);
CREATE TABLE flushes (
	owner BLOB NOT NULL, 
	after_batch INTEGER NOT NULL, 
	PRIMARY KEY (owner, after_batch)
);
CREATE TABLE gradients (
	number INTEGER NOT NULL, 
	owner BLOB NOT NULL, 
	slot INTEGER NOT NULL, 
	items BLOB NOT NULL, 
	gradient BLOB NOT NULL, 
	PRIMARY KEY (number)
);
CREATE TABLE held (
	owner BLOB NOT NULL, 
	rows BLOB NOT NULL, 
	PRIMARY KEY (owner)
);
CREATE TABLE passes (
	owner BLOB NOT NULL, 
	run_id VARCHAR NOT NULL, 
	epoch INTEGER NOT NULL, 
	blocks INTEGER NOT NULL, 
	PRIMARY KEY (owner, run_id, epoch)
);
CREATE TABLE slots (
	run_id VARCHAR NOT NULL, 
	user BLOB NOT NULL, 
	slot INTEGER NOT NULL, 
	PRIMARY KEY (run_id, user), 
	UNIQUE (run_id, slot)
);
CREATE TABLE visits (
	number INTEGER NOT NULL, 
	owner BLOB NOT NULL, 
	user BLOB NOT NULL, 
	visit INTEGER NOT NULL, 
	epoch INTEGER NOT NULL, 
	complete BOOLEAN NOT NULL, 
	length INTEGER NOT NULL, 
	records BLOB NOT NULL, 
	reply BLOB NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (owner, user, visit)
);
CREATE TABLE windows (
	owner BLOB NOT NULL, 
	joined INTEGER NOT NULL, 
	contribution BLOB NOT NULL, 
	ledger VARCHAR NOT NULL, 
	offered INTEGER NOT NULL, 
	rows BLOB NOT NULL, 
	PRIMARY KEY (owner)
);
