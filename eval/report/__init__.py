"""All rules of one model in one report: values, tables, notes and a picture."""
